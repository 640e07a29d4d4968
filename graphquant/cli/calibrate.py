"""`calibrate_command`, which can be interrupted and goes on from there."""

from __future__ import annotations

import os
import shlex
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphquant.cli.options import INTERRUPTED, MAX_MEMORY, parse_max_memory, parse_shard
from graphquant.cli.output import print_view, progress_bar
from graphquant.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.api import Progress
    from graphquant.calibration import Stats


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="MODEL", type=click.Path(path_type=Path))
@click.option("--data", metavar="SPEC", help="Calibration data, as for insert.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The statistics file, NAME.gqs.")
@click.option("--rules", multiple=True, metavar="NAME|FILE", help="Observe what insert needs with these rules.")
@click.option("--all", "everything", is_flag=True, help="Observe every float tensor, for any rules.")
@click.option("--shard", metavar="I/N", help="Run only part I of N; merge the parts with --merge.")
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Use only the first N samples.")
@MAX_MEMORY
@click.option("--merge", "merging", is_flag=True, help="Merge the statistics files named in place of MODEL.")
@click.option("--force", is_flag=True, help="Replace an existing output, also one that could be continued.")
def calibrate_command(paths: tuple[Path, ...], output: Path, merging: bool, force: bool, **options: Any) -> None:
    """Run MODEL on data and write statistics, for insert --stats.

    Interrupted, it keeps what it has, and the same command goes on from there.
    """
    from graphquant import api
    from graphquant.api import models

    if merging:
        if len(paths) == 1 or any(options.values()):
            raise UsageError("--merge takes two or more statistics files and -o, and no other options.")
        models.check_output(output, force=force)
        _check_stats_name(output)
        _save_and_print_stats(api.merge_stats(paths), output)
        return
    if len(paths) > 1:
        raise UsageError(f"{paths[1]} is one too many: calibrate takes one model. --merge takes statistics files.")
    partial_stats = _load_partial_stats(paths[0], output, force=force)
    _check_stats_name(output)
    with _stop_on_interrupt() as stop_request, progress_bar() as progress, _name_stats_in_errors(output):
        stats = api.calibrate(
            paths[0],
            data=options["data"],
            rules=options["rules"],
            everything=options["everything"],
            samples=options["samples"],
            shard=parse_shard(options["shard"]),
            max_memory=parse_max_memory(options["max_memory"]),
            partial_stats=partial_stats,
            should_stop=stop_request.is_requested,
            progress=stop_request.watch_progress(progress),
        )
    if not stop_request.interrupted:
        _save_and_print_stats(stats, output)
        return
    stats.save(output)
    click.echo(f"Interrupted. {output} keeps what was gathered from {stats.samples} samples. To go on:", err=True)
    click.echo(f"  {_command_to_continue(click.get_current_context())}", err=True)
    raise click.exceptions.Exit(INTERRUPTED)


class StopRequest:
    """Whether the user asked to stop, and whether that came before the end."""

    def __init__(self) -> None:
        self._requested = self._started = self._incomplete = False

    def handle(self, *_: object) -> None:
        """What Ctrl-C does: it asks once, and stops at once the second time, or before anything was run."""
        if self._requested or not self._started:
            raise KeyboardInterrupt
        self._requested = True
        os.write(2, b"Stopping after this block of samples; Ctrl-C once more stops at once.\n")

    def is_requested(self) -> bool:
        """Whether to stop."""
        return self._requested

    @property
    def interrupted(self) -> bool:
        """Whether that left something to do."""
        return self._requested and self._incomplete

    def watch_progress(self, progress: Progress | None) -> Progress:
        """`progress`, listened to."""

        def listen(stage_name: str, completed: int, total: int) -> None:
            self._started, self._incomplete = True, completed < total
            if progress is not None:
                progress(stage_name, completed, total)

        return listen


@contextmanager
def _stop_on_interrupt() -> Iterator[StopRequest]:
    """Ctrl-C asks to stop instead of stopping."""
    stop = StopRequest()
    previous_handler = signal.signal(signal.SIGINT, stop.handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous_handler)


@contextmanager
def _name_stats_in_errors(output: Path) -> Iterator[None]:
    """Names the statistics that cannot be continued."""
    from graphquant.calibration import ResumeError

    try:
        yield
    except ResumeError as error:
        raise ResumeError(error.reason, str(output)) from error


def _load_partial_stats(model: Path, output: Path, *, force: bool) -> Stats | None:
    """The statistics at `output`, to go on from."""
    from graphquant.api import models
    from graphquant.calibration import load_stats

    models.check_output(output, model, force=force or output.is_file())
    if force or not output.exists():
        return None
    try:
        return load_stats(output)
    except DataError:  # then it is something else, which is not to be lost
        models.check_output(output, model)
        raise


def _check_stats_name(output: Path) -> None:
    if output.suffix != ".gqs":
        raise UsageError(
            f"{output} is not called NAME.gqs, by which inspect knows statistics. Give such a name with -o."
        )


def _save_and_print_stats(stats: Stats, output: Path) -> None:
    from graphquant.visualize import text

    stats.save(output)
    print_view(text.stats_view(stats, output))


def _command_to_continue(ctx: click.Context) -> str:
    """The command line that `ctx` stands for, without --force."""
    arguments = ["graphquant", *([ctx.info_name] if ctx.info_name else [])]
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "") if parameter.name != "force" else None
        name = [] if isinstance(parameter, click.Argument) else [max(parameter.opts, key=len)]
        if value is True:
            arguments += name
        elif value not in {None, False}:
            arguments += [
                argument
                for element in (value if isinstance(value, tuple) else (value,))
                for argument in (*name, str(element))
            ]
    return shlex.join(arguments)
