"""`calibrate_command`, which can be interrupted and goes on from there."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphquant.cli.options import (
    FORCE,
    INTERRUPTED,
    PATH,
    GroupedCommand,
    NameType,
    collect_options,
    example_lines,
    options_of,
    parse_shard,
)
from graphquant.cli.output import lock_output_of_command, print_view, progress_bar, remember_output, signal_handler
from graphquant.errors import DataError, UsageError
from graphquant.utils.options import CalibrateOptions

if TYPE_CHECKING:
    from graphquant.calibration.stats import Stats
    from graphquant.utils import Progress


@click.command(
    "calibrate",
    cls=GroupedCommand,
    epilog=example_lines(
        "calibrate model.onnx --data calibration.npz -o model.gqs",
        "calibrate model.onnx --data photos,preset=imagenet --shard 1/4 -o part1.gqs",
        "calibrate --merge part1.gqs part2.gqs -o model.gqs",
    ),
)
@click.argument("paths", nargs=-1, required=True, metavar="MODEL", type=PATH)
@click.option("--data", type=NameType(files=True), metavar="SPEC", help="Calibration data, as for insert.")
@click.option("-o", "--output", required=True, type=PATH, help="Statistics file, NAME.gqs.")
@options_of(CalibrateOptions)
@click.option("--shard", "shard_text", metavar="I/N", help="Run only part I of N. --merge merges the parts.")
@click.option("--merge", "merging", is_flag=True, help="Merge statistics files, given in place of MODEL.")
@FORCE
def calibrate_command(
    paths: tuple[Path, ...],
    output: Path,
    data: str | None,
    shard_text: str | None,
    merging: bool,
    force: bool,
    **values: Any,
) -> None:
    """Run MODEL on data and write statistics for insert --stats.

    An interrupted calibration keeps its statistics, and the same command continues it.
    """
    from graphquant.api.calibrate import calibrate, merge_stats
    from graphquant.api.models import check_output

    if merging:
        if len(paths) == 1 or data or shard_text or any(values.values()):
            raise UsageError("--merge needs two or more statistics files and -o, and no other options.")
        check_output(output, force=force)
        _check_stats_name(output)
        lock_output_of_command(output)
        _save_and_print_stats(merge_stats(paths), output)
        return
    if len(paths) > 1:
        raise UsageError(f"calibrate takes one model, so {paths[1]} is unexpected. --merge takes statistics files.")
    settings = collect_options(CalibrateOptions, values, shard=parse_shard(shard_text))
    partial_stats = _load_partial_stats(paths[0], output, force=force)
    _check_stats_name(output)
    stop_request = StopRequest()
    with signal_handler(signal.SIGINT, stop_request.handle), progress_bar() as progress, _name_stats_in_errors(output):
        stats = calibrate(
            paths[0],
            None,
            data,
            settings,
            partial_stats=partial_stats,
            should_stop=lambda: stop_request.requested,
            progress=stop_request.watch_progress(progress),
        )
    if not stop_request.interrupted:
        _save_and_print_stats(stats, output)
        return
    stats.save(output)
    click.echo(f"Interrupted. {output} has the statistics of {stats.samples} samples. To continue:", err=True)
    click.echo(f"  {_command_to_continue(click.get_current_context())}", err=True)
    raise click.exceptions.Exit(INTERRUPTED)


class StopRequest:
    """Request to stop after the current block of samples."""

    def __init__(self) -> None:
        self.requested = self._started = self._incomplete = False

    def handle(self, *_: object) -> None:
        """Handle Ctrl-C: request a stop, or stop immediately the second time and before the first block."""
        if self.requested or not self._started:
            raise KeyboardInterrupt
        self.requested = True
        os.write(2, b"Stopping after this block of samples. Press Ctrl-C again to stop immediately.\n")

    @property
    def interrupted(self) -> bool:
        """True if the stop left samples unprocessed."""
        return self.requested and self._incomplete

    def watch_progress(self, progress: Progress | None) -> Progress:
        """Wrap a progress callback to note if samples remain."""

        def listen(stage_name: str, completed: int, total: int) -> None:
            self._started, self._incomplete = True, completed < total
            if progress is not None:
                progress(stage_name, completed, total)

        return listen


@contextmanager
def _name_stats_in_errors(output: Path) -> Iterator[None]:
    """Add the file name to errors about statistics that cannot be continued."""
    from graphquant.calibration.calibrate import ResumeError

    try:
        yield
    except ResumeError as error:
        raise ResumeError(error.reason, str(output)) from error


def _load_partial_stats(model: Path, output: Path, *, force: bool) -> Stats | None:
    """Load the statistics of an interrupted calibration from `output`, or return None."""
    from graphquant.api.models import check_output
    from graphquant.calibration.stats import load_stats

    check_output(output, model, force=force or output.is_file())
    lock_output_of_command(output)
    if force or not output.exists():
        return None
    try:
        return load_stats(output)
    except DataError:  # another kind of file, which must not be overwritten without --force
        check_output(output, model)
        raise


def _check_stats_name(output: Path) -> None:
    if output.suffix != ".gqs":
        raise UsageError(f"{output} does not end in .gqs, by which inspect recognizes statistics. Use -o NAME.gqs.")


def _save_and_print_stats(stats: Stats, output: Path) -> None:
    from graphquant.visualize import text

    stats.save(output)
    remember_output(output)
    print_view(text.stats_view(stats, output))


def _command_to_continue(ctx: click.Context) -> str:
    """Return the command line of `ctx` without --force, which would discard the statistics."""
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
