"""Where results go: stdout or a file, progress to stderr."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from graphquant.errors import UsageError, escape_unprintable
from graphquant.utils.atomic_files import atomic_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from graphquant.api import Progress
    from graphquant.batch.types import Entry, Outcome
    from graphquant.calibration import Stats
    from graphquant.visualize.drawing import Drawing


def write_or_print(content: Any, output: Path | None) -> None:
    """JSON data or text, to the file or stdout."""
    if output is not None:
        write_text_or_json(output, content)
    else:
        click.echo(
            content if isinstance(content, str) else json.dumps(content, indent=2), nl=not isinstance(content, str)
        )


def print_view(view: Any, output: Path | None = None) -> None:
    """A drawing of rich's, to the terminal, or as plain text to the file or to what stands in for a terminal."""
    from graphquant.visualize import text

    if output is not None:
        write_text_or_json(output, text.render_text(view))
    elif (console := text.make_console()).is_terminal:
        console.print(view, crop=False)
    else:
        sys.stdout.write(text.render_text(view, folded=True))  # click would write letters that its encoding lacks
        sys.stdout.flush()


def write_text_or_json(path: Path, content: Any) -> None:
    """Writes text, or data as JSON, whole or not at all."""
    text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
    try:
        with atomic_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. Give another file.") from error


def write_drawing_page(path: Path, drawing: Drawing, stats: Stats | None = None) -> None:
    """Writes a drawing as a page to look around in, with what is to be known of the statistics that it shows."""
    from graphquant.visualize.html import viewer_page
    from graphquant.visualize.text import incomplete_stats
    from graphquant.visualize.viewer_data import viewer_data

    notes = ["The data is RANDOM: what it shows is for tests only."] if stats is not None and stats.random else []
    notes += [str(line) for line in incomplete_stats(stats)] if stats is not None else []
    write_text_or_json(path, viewer_page(viewer_data(drawing, notes)))
    click.echo(f"Written to {escape_unprintable(str(path))}", err=True)


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """A progress bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from graphquant.visualize import text

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Bar(*columns, console=text.make_console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def update(stage_name: str, completed: int, total: int) -> None:
            if stage_name not in tasks:
                tasks[stage_name] = bar.add_task(stage_name, total=total)
            bar.update(tasks[stage_name], completed=completed)

        yield update


class BatchProgress:
    """Tells on stderr how far a batch is: with bars on a terminal, else with a line for each model that was worked on.

    Args:
        total: How many models there are.
        bar: What draws the bars, None where stderr is no terminal.
    """

    def __init__(self, total: int, bar: Any) -> None:
        self._total, self._bar, self._count = total, bar, 0
        self._tasks: dict[str, Any] = {}
        self._models_task = bar.add_task("models", total=total) if bar is not None else None

    def update_model(self, entry: Entry, stage_name: str, completed: int, total: int) -> None:
        """A worker is so far with a model."""
        if self._bar is None:
            return
        description = escape_unprintable(f"  {entry.name}: {stage_name}" if stage_name else f"  {entry.name}")
        if entry.name not in self._tasks:
            self._tasks[entry.name] = self._bar.add_task(description, total=None)
        self._bar.update(self._tasks[entry.name], description=description, completed=completed, total=total or None)

    def finish_model(self, outcome: Outcome) -> None:
        """A model is finished."""
        self._count += 1
        if self._bar is not None:
            self._bar.update(self._models_task, completed=self._count)
            if outcome.name in self._tasks:
                self._bar.remove_task(self._tasks.pop(outcome.name))
        elif outcome.status != "unchanged":
            click.echo(escape_unprintable(f"[{self._count}/{self._total}] {outcome.name}: {outcome.status}"), err=True)


@contextmanager
def batch_progress(total: int) -> Iterator[BatchProgress]:
    """What shows how far a batch of so many models is."""
    if not sys.stderr.isatty():
        yield BatchProgress(total, None)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from graphquant.visualize import text

    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Bar(*columns, console=text.make_console(stderr=True), transient=True) as bar:
        yield BatchProgress(total, bar)
