"""Output of commands: results to stdout or a file, progress to stderr."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphquant.cli.options import WRITTEN_OUTPUTS
from graphquant.errors import escape_unprintable
from graphquant.utils.atomic_files import lock_output, write_file

if TYPE_CHECKING:
    from graphquant.batch.types import Entry, Outcome
    from graphquant.calibration.stats import Stats
    from graphquant.utils import Progress
    from graphquant.visualize.drawing import Drawing


def lock_output_of_command(output: Path) -> None:
    """Keep other processes from writing the output until the current command ends."""
    click.get_current_context().with_resource(lock_output(output))


def remember_output(path: Path) -> None:
    """Have an error message say that the file was written, if a later step of the command fails."""
    click.get_current_context().meta.setdefault(WRITTEN_OUTPUTS, []).append(path)


def write_or_print(content: Any, output: Path | None) -> None:
    """Write text, or data as JSON, to the file or to stdout."""
    if output is not None:
        write_text_or_json(output, content)
    elif isinstance(content, str):
        click.echo(content, nl=False)
    else:
        click.echo(json.dumps(content, indent=2))


def write_result(command: str, result: object, output: Path | None = None) -> None:
    """Write the result of a command as JSON to the file or to stdout."""
    from graphquant.visualize.json_export import RESULTS

    write_or_print(RESULTS[command].model_validate(result).as_json(), output)


def print_notes(notes: Iterable[str]) -> None:
    """Print notes to stderr."""
    for note in notes:
        click.echo(escape_unprintable(f"note: {note}"), err=True)


def print_view(view: Any, output: Path | None = None) -> None:
    """Print a rich renderable: with colors to a terminal, as plain text to a file or a pipe."""
    from graphquant.visualize import tables

    if output is not None:
        write_text_or_json(output, tables.render_text(view))
    elif (console := tables.make_console()).is_terminal:
        console.print(view, crop=False)
    else:
        # click.echo would print characters that the encoding of the pipe lacks; render_text replaces them.
        sys.stdout.write(tables.render_text(view, folded=True))
        sys.stdout.flush()


def write_text_or_json(path: Path, content: Any) -> None:
    """Write text, or data as JSON, atomically."""
    write_file(path, content if isinstance(content, str) else json.dumps(content, indent=2) + "\n")
    remember_output(path)


def write_page(path: Path, page: str) -> None:
    """Write an HTML page and report its path."""
    write_text_or_json(path, page)
    click.echo(f"Written to {escape_unprintable(str(path))}", err=True)


def write_drawing_page(
    path: Path, drawing: Drawing, stats: Stats | None = None, figures: Sequence[tuple[str, str]] = ()
) -> None:
    """Write a drawing as an interactive page, with figures at its top and notes about the statistics in it."""
    from graphquant.visualize.text import incomplete_stats
    from graphquant.visualize.viewer_data import viewer_data, viewer_page

    notes = ["The data is RANDOM. Use this page only for tests."] if stats is not None and stats.random else []
    notes += [str(line) for line in incomplete_stats(stats)] if stats is not None else []
    write_page(path, viewer_page(viewer_data(drawing, notes, figures=figures)))


@contextmanager
def terminal_bar(last_column: str) -> Iterator[Any]:
    """Show a progress bar on stderr, or yield None if it is no terminal. `last_column` names a class of rich."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as rich_progress

    from graphquant.visualize import tables

    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        getattr(rich_progress, last_column)(),
    )
    with rich_progress.Progress(*columns, console=tables.make_console(stderr=True), transient=True) as bar:
        yield bar


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """Return a progress callback that draws a bar for each stage on stderr, or None if stderr is not a terminal."""
    with terminal_bar("TimeRemainingColumn") as bar:
        tasks: dict[str, Any] = {}

        def update(stage: str, completed: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=completed)

        yield None if bar is None else update


class BatchProgress:
    """Progress of a batch on stderr: bars on a terminal, else one line for each model that was processed.

    Args:
        total: Number of models.
        bar: Rich progress bar, or None if stderr is not a terminal.
    """

    def __init__(self, total: int, bar: Any) -> None:
        self._total, self._bar, self._count = total, bar, 0
        self._tasks: dict[str, Any] = {}
        self._models_task = bar.add_task("models", total=total) if bar is not None else None

    def update_model(self, entry: Entry, stage: str, completed: int, total: int) -> None:
        """Report the progress of one model."""
        if self._bar is None:
            return
        description = escape_unprintable(f"  {entry.name}: {stage}" if stage else f"  {entry.name}")
        if entry.name not in self._tasks:
            self._tasks[entry.name] = self._bar.add_task(description, total=None)
        self._bar.update(self._tasks[entry.name], description=description, completed=completed, total=total or None)

    def finish_model(self, outcome: Outcome) -> None:
        """Report that a model is finished."""
        self._count += 1
        if self._bar is not None:
            self._bar.update(self._models_task, completed=self._count)
            if outcome.name in self._tasks:
                self._bar.remove_task(self._tasks.pop(outcome.name))
        elif outcome.status != "unchanged":
            line = f"[{self._count}/{self._total}] {outcome.name}: {outcome.status}"
            click.echo(escape_unprintable(line), err=True)


@contextmanager
def signal_handler(number: int, handler: Callable[..., object]) -> Iterator[None]:
    """Handle a signal in another way for a while."""
    previous_handler = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous_handler)
