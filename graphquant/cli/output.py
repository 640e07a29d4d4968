"""Where results go: stdout or a file, progress to stderr."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from graphquant.errors import UsageError, printable
from graphquant.whole import whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from graphquant.calibration import Stats
    from graphquant.pipeline import Progress
    from graphquant.view.drawing import Drawing


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


def write_page(path: Path, drawing: Drawing, stats: Stats | None = None) -> None:
    """Writes a drawing as a page to look around in, with what is to be known of the statistics that it shows."""
    from graphquant.view.html import page
    from graphquant.view.payload import payload
    from graphquant.view.text import incomplete

    notes = ["The data is RANDOM: what it shows is for tests only."] if stats is not None and stats.random else []
    notes += [str(line) for line in incomplete(stats)] if stats is not None else []
    write(path, page(payload(drawing, notes)))
    click.echo(f"Written to {printable(str(path))}")


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
