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

    from graphquant.batch.types import Entry, Outcome
    from graphquant.calibration import Stats
    from graphquant.pipeline import Progress
    from graphquant.view.drawing import Drawing


def emit(what: Any, output: Path | None) -> None:
    """JSON data or text, to the file or stdout."""
    if output is not None:
        write(output, what)
    else:
        click.echo(what if isinstance(what, str) else json.dumps(what, indent=2), nl=not isinstance(what, str))


def print_view(view: Any, output: Path | None = None) -> None:
    """A drawing of rich's, to the terminal, or as plain text to the file or to what stands in for a terminal."""
    from graphquant.view import text

    if output is not None:
        write(output, text.text_of(view))
    elif (console := text.console()).is_terminal:
        console.print(view, crop=False)
    else:
        sys.stdout.write(text.text_of(view, folded=True))  # click would write letters that its encoding lacks
        sys.stdout.flush()


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
    click.echo(f"Written to {printable(str(path))}", err=True)


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


class Bars:
    """Tells on stderr how far a batch is: with bars on a terminal, else with a line for each model that was worked on.

    Args:
        total: How many models there are.
        bar: What draws the bars, None where stderr is no terminal.
    """

    def __init__(self, total: int, bar: Any) -> None:
        self._total, self._bar, self._count = total, bar, 0
        self._tasks: dict[str, Any] = {}
        self._all = bar.add_task("models", total=total) if bar is not None else None

    def told(self, entry: Entry, what: str, done: int, total: int) -> None:
        """A worker is so far with a model."""
        if self._bar is None:
            return
        said = printable(f"  {entry.name}: {what}" if what else f"  {entry.name}")
        if entry.name not in self._tasks:
            self._tasks[entry.name] = self._bar.add_task(said, total=None)
        self._bar.update(self._tasks[entry.name], description=said, completed=done, total=total or None)

    def done(self, outcome: Outcome) -> None:
        """A model is finished."""
        self._count += 1
        if self._bar is not None:
            self._bar.update(self._all, completed=self._count)
            if outcome.name in self._tasks:
                self._bar.remove_task(self._tasks.pop(outcome.name))
        elif outcome.status != "unchanged":
            click.echo(printable(f"[{self._count}/{self._total}] {outcome.name}: {outcome.status}"), err=True)


@contextmanager
def batch_bars(total: int) -> Iterator[Bars]:
    """What shows how far a batch of so many models is."""
    if not sys.stderr.isatty():
        yield Bars(total, None)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from graphquant.view import text

    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Bar(*columns, console=text.console(stderr=True), transient=True) as bar:
        yield Bars(total, bar)
