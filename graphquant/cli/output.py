"""Where results go: stdout or a file, progress to stderr."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from graphquant.errors import UsageError
from graphquant.whole import whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from graphquant.pipeline import Progress


def emit(what: Any, output: Path | None) -> None:
    """JSON data or text, to the file or stdout."""
    if output is not None:
        write(output, what)
    else:
        click.echo(what if isinstance(what, str) else json.dumps(what, indent=2), nl=not isinstance(what, str))


def print_view(view: Any, output: Path | None) -> None:
    """A drawing of rich's, to the terminal or as plain text to the file."""
    from graphquant.view import text

    if output is None:
        text.console().print(view)
        return
    from io import StringIO

    lines = StringIO()
    text.console(file=lines).print(view)
    write(output, lines.getvalue())


def write(path: Path, what: Any) -> None:
    """Writes text, or data as JSON, whole or not at all."""
    text = what if isinstance(what, str) else json.dumps(what, indent=2) + "\n"
    try:
        with whole(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. Give another file.") from error


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """A progress bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from graphquant.view import text

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Bar(*columns, console=text.console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def told(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        yield told
