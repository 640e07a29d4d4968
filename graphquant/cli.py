"""The command line: parses, calls the pipeline, prints. What a command needs is imported when it runs."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from graphquant.errors import DataError, FindingsError, GraphQuantError, InternalError, UsageError, printable

if TYPE_CHECKING:
    from graphquant.calibration import Stats
    from graphquant.pipeline import Progress, Result

INTERRUPTED = 130

LONGEST_LINE = 2_000
"""Characters of an error's line that are shown: a name in a model may have millions."""

F = TypeVar("F", bound=Callable[..., Any])


class _Group(click.Group):
    """Turns every ending into a message and an exit code; a traceback would be our own fault."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GraphQuantError as error:
            click.echo(f"Error: {_told(error)}", err=True)
            raise click.exceptions.Exit(error.exit_code) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader has enough; click ends quietly
                raise
            raise _failed(error) from error
        except KeyboardInterrupt as error:
            click.echo("Interrupted.", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from error
        except MemoryError as error:
            click.echo("Error: there is not enough memory for this model. Try a machine with more.", err=True)
            raise click.exceptions.Exit(InternalError.exit_code) from error


def _selection(command: F) -> F:
    """The options that choose what is quantized."""
    options = [
        click.option(
            "--rules",
            multiple=True,
            metavar="NAME|FILE|RULE",
            help="Rule file, or 'PRODUCER > CONSUMER: BITS, EXPONENT'; repeat it to stack, first match wins.",
        ),
        click.option(
            "--include", multiple=True, metavar="PATTERN", help="Quantize only what this glob or /regex/ names."
        ),
        click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave what this glob or /regex/ names."),
        click.option("--family", metavar="NAME", help="QDQ ops for schemes that name none: onnx-qdq, fake-quant."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


_MAX_MEMORY = click.option(
    "--max-memory",
    metavar="SIZE",
    help="Bytes that observed values may take, 512MB or 2GB; by default half of what is free.",
)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="graphquant")
def main() -> None:
    """Quantize trained TensorFlow and ONNX graphs, and see exactly what was done.

    Results go to stdout, progress to stderr. Exit codes: 0 done, 1 findings, 2 usage or rule-file error, 3 model cannot
    be read, 4 a package is missing, 130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal's encoding may lack a name's letters
            stream.reconfigure(errors="backslashreplace")


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Default: MODEL's name with .quant in it.")
@_selection
@click.option(
    "--data",
    metavar="SPEC",
    help="Calibration data: .npz, a folder, photos,preset=imagenet, module:function (it is run); see docs/data.md.",
)
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Use only the first N samples.")
@click.option(
    "--plan", "plan_file", type=click.Path(path_type=Path), metavar="FILE", help="Apply this plan instead of rules."
)
@click.option(
    "--stats", type=click.Path(path_type=Path), metavar="FILE", help="Statistics from calibrate, in place of --data."
)
@click.option("--method", metavar="NAME", help="How ranges are picked from the data, whatever the rules say.")
@_MAX_MEMORY
@click.option(
    "--ranges",
    type=click.Path(path_type=Path),
    metavar="FILE.tflite",
    help="Use this file's scales for the activations that have the same names.",
)
@click.option(
    "--ranges-map",
    type=click.Path(path_type=Path),
    metavar="FILE.toml",
    help="Say which tensor of the model is which of that file's.",
)
@click.option("--float-weights", is_flag=True, help="Keep weights float, behind a whole QDQ pair.")
@click.option("--dry-run", is_flag=True, help="Do everything but write.")
@click.option("--report", type=click.Path(path_type=Path), metavar="FILE", help="Write what was done as JSON.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def insert(  # click passes what the user gave
    model: Path,
    output: Path | None,
    rules: tuple[str, ...],
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    family: str | None,
    data: str | None,
    samples: int | None,
    plan_file: Path | None,
    stats: Path | None,
    method: str | None,
    max_memory: str | None,
    ranges: Path | None,
    ranges_map: Path | None,
    float_weights: bool,
    dry_run: bool,
    report: Path | None,
    force: bool,
) -> None:
    """Quantize MODEL: plan, calibrate, rewrite, write."""
    if plan_file is not None and (rules or include or exclude or family):
        raise UsageError(
            "--plan applies a plan as it is; --rules, --include, --exclude and --family make one. Give either."
        )
    if stats is not None and (data is not None or samples is not None):
        raise UsageError("--stats takes the place of --data and --samples. Give either.")
    if ranges_map is not None and ranges is None:
        raise UsageError("--ranges-map names tensors of the file that --ranges gives. Give that too.")
    from graphquant import pipeline

    target = output or pipeline.default_output(model)
    to_tflite = _check_outputs(model, target, report, dry_run=dry_run, force=force)
    loaded = pipeline.load(model)
    if to_tflite:
        from graphquant import tflite

        loaded = tflite.freeze(loaded)
    with _progress() as progress:
        result = pipeline.insert(
            loaded,
            rules=rules,
            data=data,
            stats=stats,
            plan=plan_file,
            method=method,
            samples=samples,
            max_memory=_memory(max_memory),
            ranges=ranges,
            ranges_map=ranges_map,
            include=include,
            exclude=exclude,
            family=family,
            float_weights=float_weights,
            progress=progress,
        )
    _deliver(result, target, to_tflite=to_tflite, report=report, dry_run=dry_run, force=force)


def _check_outputs(model: Path, target: Path, report: Path | None, *, dry_run: bool, force: bool) -> bool:
    """Refuses outputs that cannot be written, before any work is done; tells whether a TFLite file is to be made."""
    from graphquant import formats, pipeline

    form = formats.format_of(model)
    to_tflite = form == "tensorflow" and target.suffix == ".tflite"
    if to_tflite and not dry_run:
        pipeline.check_output(target, model, force=force)
    elif not dry_run:
        pipeline.check_model_output(target, model, form, force=force)
    if report is not None:
        pipeline.check_output(report, model, force=True)
        if report.resolve() == target.resolve():
            raise UsageError(f"--report {report} is the output itself. Give the report another name.")
    return to_tflite


def _deliver(result: Result, target: Path, *, to_tflite: bool, report: Path | None, dry_run: bool, force: bool) -> None:
    """Writes what insert made, as a TFLite file with its receipt where asked, and tells what was done."""
    from graphquant.view import data as view_data
    from graphquant.view import text

    receipt, written = None, None if dry_run else target
    if to_tflite:
        from graphquant import tflite

        receipt = tflite.convert(result, written, force=force)
    elif written is not None:
        written = result.save(target, force=force)
    if report is not None:
        _write(report, view_data.result_json(result, str(written) if written else None, receipt))
    text.console().print(text.result_view(result, written))
    if receipt is not None:
        text.console().print(text.receipt_view(receipt))
    if receipt is not None and not receipt.agrees:
        raise FindingsError(
            f"{target.name} does not have every scale that was planned; the table above has the runtime's beside"
            " them. Leave those tensors with --exclude, or give them the runtime's ranges."
        )


@main.command()
@click.argument("paths", nargs=-1, required=True, metavar="MODEL", type=click.Path(path_type=Path))
@click.option("--data", metavar="SPEC", help="Calibration data, as for insert.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The statistics file, NAME.gqs.")
@click.option("--rules", multiple=True, metavar="NAME|FILE", help="Observe what insert needs with these rules.")
@click.option("--all", "everything", is_flag=True, help="Observe every float tensor, for any rules.")
@click.option("--shard", metavar="I/N", help="Run only part I of N; merge the parts with --merge.")
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Use only the first N samples.")
@_MAX_MEMORY
@click.option("--merge", "merging", is_flag=True, help="Merge the statistics files named in place of MODEL.")
@click.option("--force", is_flag=True, help="Replace an existing output, also one that could be continued.")
def calibrate(paths: tuple[Path, ...], output: Path, merging: bool, force: bool, **options: Any) -> None:
    """Run MODEL on data and write statistics, for insert --stats.

    Interrupted, it keeps what it has, and the same command goes on from there.
    """
    from graphquant import pipeline

    if merging:
        if len(paths) == 1 or any(options.values()):
            raise UsageError("--merge takes two or more statistics files and -o, and no other options.")
        pipeline.check_output(output, force=force)
        _finish(pipeline.merge_stats(paths), output)
        return
    if len(paths) > 1:
        raise UsageError(f"{paths[1]} is one too many: calibrate takes one model. --merge takes statistics files.")
    before = _unfinished(paths[0], output, force=force)
    with _interruptible() as stopped, _progress() as progress:
        found = pipeline.calibrate(
            paths[0],
            data=options["data"],
            rules=options["rules"],
            everything=options["everything"],
            samples=options["samples"],
            shard=_shard(options["shard"]),
            max_memory=_memory(options["max_memory"]),
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


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@_selection
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to this file instead of stdout.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def plan(
    model: Path,
    rules: tuple[str, ...],
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    family: str | None,
    form: str,
    output: Path | None,
    force: bool,
) -> None:
    """Show what insert would do to MODEL. --format json gives a plan that insert --plan applies."""
    from graphquant import pipeline

    if output is not None:
        pipeline.check_output(output, model, force=force)
    made = pipeline.plan(model, rules=rules, include=include, exclude=exclude, family=family)
    if form == "json":
        from graphquant.plans import to_json

        _emit(to_json(made), output)
    else:
        from graphquant.view import text

        _print(text.plan_view(made), output)


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("what", metavar="TENSOR|OP")
@click.option("--rules", multiple=True, metavar="NAME|FILE", help="Rule file; repeat it to stack, first match wins.")
def explain(model: Path, what: str, rules: tuple[str, ...]) -> None:
    """Tell which rule took each use of TENSOR, or around OP. For the other rules it says why they did not."""
    from graphquant import pipeline
    from graphquant.view import text

    text.console().print(text.explain_view(pipeline.explain(pipeline.load(model), what, rules=rules)))


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["text", "json", "dot"]), default="text", show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to this file instead of stdout.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def inspect(model: Path, form: str, output: Path | None, force: bool) -> None:
    """Show MODEL's quantization ops, and what stays float. Each with its dtype, scale, zero point and range."""
    from graphquant import pipeline
    from graphquant.survey import survey

    if output is not None:
        pipeline.check_output(output, model, force=force)
    loaded = pipeline.load(model)
    if form == "dot":
        from graphquant.view.dot import dot

        _emit(dot(loaded), output)
    elif form == "json":
        from graphquant.view.data import survey_json

        _emit(survey_json(survey(loaded)), output)
    else:
        from graphquant.view import text

        _print(text.survey_view(survey(loaded)), output)


@main.group()
def data() -> None:
    """Look at calibration data."""


@data.command("check")
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("spec")
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Look at the first N samples only.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def data_check(model: Path, spec: str, samples: int | None, form: str) -> None:
    """Show what SPEC feeds each input of MODEL, and what is probably wrong with it. Exit code 1 if anything is."""
    from graphquant import pipeline
    from graphquant.view import data_check as view
    from graphquant.view import text

    report = pipeline.check_data(model, spec, samples=samples)
    if form == "json":
        _emit(view.report_json(report), None)
    else:
        text.console().print(view.report_view(report))
    if report.findings:
        raise click.exceptions.Exit(FindingsError.exit_code)


@main.group()
def rules() -> None:
    """List, show and check rule files; print their JSON Schema."""


@rules.command("list")
def rules_list() -> None:
    """List the rule files that come with graphquant."""
    from rich.table import Table

    from graphquant.ruleset import load_ruleset, shipped
    from graphquant.view import text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "rules", "description"):
        table.add_column(column)
    for name in shipped():
        found = load_ruleset([name])
        table.add_row(name, str(len(found.rules)), found.descriptions[0])
    text.console().print(table)


@rules.command("show")
@click.argument("name")
def rules_show(name: str) -> None:
    """Print the rule file NAME, to read or to copy."""
    from graphquant.ruleset import find

    click.echo(find(name).read_text("utf-8"), nl=False)


@rules.command("check")
@click.argument("files", nargs=-1, required=True, metavar="NAME|FILE...")
def rules_check(files: tuple[str, ...]) -> None:
    """Check rule files; every mistake is listed as file:line."""
    from graphquant.ruleset import load_ruleset

    found = load_ruleset(list(files))
    click.echo(f"{', '.join(files)}: no mistakes in {len(found.rules)} rule{'' if len(found.rules) == 1 else 's'}.")


@rules.command("schema")
def rules_schema() -> None:
    """Print the JSON Schema of rule files, for editors."""
    from graphquant.ruleset import schema

    click.echo(json.dumps(schema(), indent=2))


def _failed(error: OSError) -> click.exceptions.Exit:
    """Tells what the system refused where no file is read or written: a name too long, a full standard output."""
    name = f"{error.filename} cannot be used" if error.filename else "The result cannot be written to standard output"
    told = _told(UsageError(f"{name}: {error.strerror}. Give another path, or make room."))
    click.echo(f"Error: {told}", err=True)
    return click.exceptions.Exit(UsageError.exit_code)


def _told(error: GraphQuantError) -> str:
    """What the error says, fit for a terminal."""
    lines = [printable(line) for line in str(error).split("\n")]
    more = [f" ... ({len(line) - LONGEST_LINE} more characters)" if len(line) > LONGEST_LINE else "" for line in lines]
    return "\n".join(line[:LONGEST_LINE] + rest for line, rest in zip(lines, more, strict=True))


class _Stop:
    """Whether the user asked to stop, and whether that came before the end."""

    def __init__(self) -> None:
        self._asked = False
        self.early = False

    def handle(self, *_: object) -> None:
        """What Ctrl-C does: it asks once, and stops at once the second time."""
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        os.write(2, b"Stopping after this block of samples; Ctrl-C once more stops at once.\n")

    def asked(self) -> bool:
        """Whether to stop."""
        return self._asked

    def told(self, progress: Progress | None) -> Progress:
        """`progress`, listened to."""

        def listen(what: str, done: int, total: int) -> None:
            self.early = self._asked and done < total
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


def _unfinished(model: Path, output: Path, *, force: bool) -> Stats | None:
    """The statistics at `output`, to go on from."""
    from graphquant import pipeline
    from graphquant.calibration import load_stats

    pipeline.check_output(output, model, force=force or output.is_file())
    if force or not output.exists():
        return None
    try:
        return load_stats(output)
    except DataError:  # then it is something else, which is not to be lost
        pipeline.check_output(output, model)
        raise


def _finish(found: Stats, output: Path) -> None:
    from graphquant.view import text

    found.save(output)
    text.console().print(text.stats_view(found, output))


def _shard(given: str | None) -> tuple[int, int]:
    """What --shard says: which part, counted from 1, of how many."""
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", given or "1/1")
    part, parts = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= part <= parts:
        raise UsageError(f"--shard {given} is no part of a whole. Write 2/8 for the second of eight.")
    return part, parts


def _memory(given: str | None) -> int | None:
    from graphquant.calibration import parse_size

    return parse_size(given) if given is not None else None


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


@contextmanager
def _progress() -> Iterator[Progress | None]:
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


def _emit(what: Any, output: Path | None) -> None:
    """JSON data or text, to the file or stdout."""
    if output is not None:
        _write(output, what)
    else:
        click.echo(what if isinstance(what, str) else json.dumps(what, indent=2), nl=not isinstance(what, str))


def _print(view: Any, output: Path | None) -> None:
    from graphquant.view import text

    if output is None:
        text.console().print(view)
        return
    from io import StringIO

    lines = StringIO()
    text.console(file=lines).print(view)
    _write(output, lines.getvalue())


def _write(path: Path, what: Any) -> None:
    """Writes text, or data as JSON, whole or not at all."""
    text = what if isinstance(what, str) else json.dumps(what, indent=2) + "\n"
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, "utf-8")
        part.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. Give another file.") from error
    finally:
        with suppress(OSError):
            part.unlink()
