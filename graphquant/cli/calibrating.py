"""`calibrate`, which can be interrupted and goes on from there."""

from __future__ import annotations

import os
import shlex
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphquant.cli.group import INTERRUPTED
from graphquant.cli.options import MAX_MEMORY, memory, shard
from graphquant.cli.output import print_view, progress_bar
from graphquant.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.calibration import Stats
    from graphquant.pipeline import Progress


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
def calibrate(paths: tuple[Path, ...], output: Path, merging: bool, force: bool, **options: Any) -> None:
    """Run MODEL on data and write statistics, for insert --stats.

    Interrupted, it keeps what it has, and the same command goes on from there.
    """
    from graphquant import outputs, pipeline

    if merging:
        if len(paths) == 1 or any(options.values()):
            raise UsageError("--merge takes two or more statistics files and -o, and no other options.")
        outputs.check_output(output, force=force)
        _check_name(output)
        _finish(pipeline.merge_stats(paths), output)
        return
    if len(paths) > 1:
        raise UsageError(f"{paths[1]} is one too many: calibrate takes one model. --merge takes statistics files.")
    before = _unfinished(paths[0], output, force=force)
    _check_name(output)
    with _interruptible() as stopped, progress_bar() as progress, _naming(output):
        found = pipeline.calibrate(
            paths[0],
            data=options["data"],
            rules=options["rules"],
            everything=options["everything"],
            samples=options["samples"],
            shard=shard(options["shard"]),
            max_memory=memory(options["max_memory"]),
            before=before,
            stop=stopped.asked,
            progress=stopped.told(progress),
        )
    if not stopped.early:
        _finish(found, output)
        return
    found.save(output)
    click.echo(f"Interrupted. {output} keeps what was gathered from {found.samples} samples. To go on:", err=True)
    click.echo(f"  {_command(click.get_current_context())}", err=True)
    raise click.exceptions.Exit(INTERRUPTED)


class _Stop:
    """Whether the user asked to stop, and whether that came before the end."""

    def __init__(self) -> None:
        self._asked = self._begun = self._left = False

    def handle(self, *_: object) -> None:
        """What Ctrl-C does: it asks once, and stops at once the second time, or before anything was run."""
        if self._asked or not self._begun:
            raise KeyboardInterrupt
        self._asked = True
        os.write(2, b"Stopping after this block of samples; Ctrl-C once more stops at once.\n")

    def asked(self) -> bool:
        """Whether to stop."""
        return self._asked

    @property
    def early(self) -> bool:
        """Whether that left something to do."""
        return self._asked and self._left

    def told(self, progress: Progress | None) -> Progress:
        """`progress`, listened to."""

        def listen(what: str, done: int, total: int) -> None:
            self._begun, self._left = True, done < total
            if progress is not None:
                progress(what, done, total)

        return listen


@contextmanager
def _interruptible() -> Iterator[_Stop]:
    """Ctrl-C asks to stop instead of stopping."""
    stop = _Stop()
    before = signal.signal(signal.SIGINT, stop.handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _naming(output: Path) -> Iterator[None]:
    """Names the statistics that cannot be continued."""
    from graphquant.calibration import NoContinuationError

    try:
        yield
    except NoContinuationError as error:
        raise NoContinuationError(error.what, str(output)) from error


def _unfinished(model: Path, output: Path, *, force: bool) -> Stats | None:
    """The statistics at `output`, to go on from."""
    from graphquant import outputs
    from graphquant.calibration import load_stats

    outputs.check_output(output, model, force=force or output.is_file())
    if force or not output.exists():
        return None
    try:
        return load_stats(output)
    except DataError:  # then it is something else, which is not to be lost
        outputs.check_output(output, model)
        raise


def _check_name(output: Path) -> None:
    if output.suffix != ".gqs":
        raise UsageError(
            f"{output} is not called NAME.gqs, by which inspect knows statistics. Give such a name with -o."
        )


def _finish(found: Stats, output: Path) -> None:
    from graphquant.view import text

    found.save(output)
    print_view(text.stats_view(found, output))


def _command(ctx: click.Context) -> str:
    """The command line that `ctx` stands for, without --force."""
    words = ["graphquant", *([ctx.info_name] if ctx.info_name else [])]
    for option in ctx.command.params:
        given = ctx.params.get(option.name or "") if option.name != "force" else None
        name = [] if isinstance(option, click.Argument) else [max(option.opts, key=len)]
        if given is True:
            words += name
        elif given not in {None, False}:
            words += [word for one in (given if isinstance(given, tuple) else (given,)) for word in (*name, str(one))]
    return shlex.join(words)
