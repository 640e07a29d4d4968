"""Commands that write models: `insert`, `strip` and `freeze`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphquant.cli.options import FORCE, HTML, PATH, GroupedCommand, collect_options, example_lines, options_of
from graphquant.cli.output import (
    lock_output_of_command,
    print_notes,
    print_view,
    progress_bar,
    remember_output,
    write_drawing_page,
    write_text_or_json,
)
from graphquant.errors import FindingsError, OutputExistsError, UsageError, escape_unprintable
from graphquant.utils.atomic_files import resumable_output
from graphquant.utils.options import NO_TARGET, InsertOptions, PlanOptions, SignatureOptions, option_fields
from graphquant.utils.text import quantized_share_failure

if TYPE_CHECKING:
    from graphquant.analysis.conversion_report import ConversionReport
    from graphquant.api.result import Result

MIN_RESUMABLE_BYTES = 1 << 28  # size of models that take long enough to keep finished parts of the result


@click.command(
    "insert",
    cls=GroupedCommand,
    epilog=example_lines(
        "insert model.onnx --data calibration.npz",
        "insert model.onnx --data photos,preset=imagenet --min-sqnr 30",
        "insert model.onnx --data calibration.npz --rules tensorrt --method entropy",
        "insert model.onnx --rules mine.toml --rules onnxruntime --exclude 'head/*'",
        "insert model.onnx --data eval.npz --algorithm bias-correction --max-accuracy-drop 0.5%",
        "insert saved_model --data calibration.npz -o model.tflite",
    ),
)
@click.argument("model", type=PATH)
@click.option("-o", "--output", type=PATH, help="Default: the name of MODEL with .quant in it.")
@options_of(InsertOptions)
@click.option("--dry-run", is_flag=True, help="Do everything except writing the model.")
@click.option("--report", type=PATH, metavar="FILE", help="Write the result as JSON.")
@click.option(
    "--export-ranges",
    type=PATH,
    metavar="FILE",
    help="Write the ranges: .encodings for AIMET, .cache for TensorRT, .json for onnxruntime's quantizer.",
)
@click.option("-v", "--verbose", is_flag=True, help="Print the scale of each tensor, and each tensor left in float.")
@click.option("-q", "--quiet", is_flag=True, help="Print only errors.")
@HTML
@FORCE
def insert_command(
    model: Path,
    output: Path | None,
    dry_run: bool,
    report: Path | None,
    export_ranges: Path | None,
    verbose: bool,
    quiet: bool,
    html: Path | None,
    force: bool,
    **values: Any,
) -> None:
    """Quantize MODEL: plan, calibrate, rewrite, validate, write.

    With data, the last fifth of the samples (at least 4) is held out for validation. With fewer than 8 samples,
    calibration uses all of them. With a bound, such as --min-sqnr, and calibration data, insert searches for the
    cheapest plan that meets it; see docs/search.md.
    """
    settings = collect_options(InsertOptions, values)
    _check_combinations(settings)
    if verbose and quiet:
        raise UsageError("--verbose prints more and --quiet nothing. Use one of them.")
    from graphquant.api.insert import insert
    from graphquant.api.models import default_output, load_source, omission_notes

    target = output or default_output(model)
    try:
        to_tflite = _check_outputs(model, target, report, html, export_ranges, dry_run=dry_run, force=force)
    except OutputExistsError:
        # Its remedy does not help if other arguments are wrong too.
        _check_inputs(model, settings)
        raise
    written = None if dry_run else target
    with ExitStack() as stack:
        if not dry_run:
            lock_output_of_command(target)
            stack.enter_context(resumable_output(target, _resume_key(model, settings)))
        source = load_source(model, settings, settings.data)
        notes = omission_notes(source)
        if to_tflite:
            from graphquant.api.convert import freeze, require_convertible

            source = freeze(source)
            require_convertible(source)
        with progress_bar() as progress:
            result = insert(source, settings, progress=progress, runtime="tflite" if to_tflite else None)
        conversion = _write_result(
            result, written, to_tflite=to_tflite, io=settings.io, report=report, html=html, force=force
        )
    if not quiet:
        _print_result(result, written, conversion, notes, tables=verbose)
    if conversion is not None and not conversion.agrees:
        raise FindingsError(
            f"{target.name} does not have all planned scales; -v lists them beside those of the runtime. Exclude these"
            " tensors with --exclude, or pass the ranges of the runtime."
        )
    if conversion is not None and conversion.failures:
        reasons = "; ".join(conversion.failures)
        raise FindingsError(f"The validation of {target.name} failed: {reasons}. Exclude tensors, or use --io float32.")
    if export_ranges is not None:
        remember_output(result.export_ranges(export_ranges))
    note = "Nothing was written." if dry_run else f"{target} was written."
    _exit_with_result(result, settings, note)


def _resume_key(model: Path, settings: InsertOptions) -> str | None:
    """Return the key of finished parts of the result; None if they are not worth keeping."""
    sizes = (file.stat().st_size for file in model.absolute().parent.iterdir() if file.is_file())
    if settings.data is not None or sum(sizes) < MIN_RESUMABLE_BYTES:
        return None  # without the import of the next line
    from graphquant.batch.cache_key import resume_key

    return resume_key(model, settings, MIN_RESUMABLE_BYTES)


def _check_combinations(settings: InsertOptions) -> None:
    """Reject options that exclude each other, or that need another option."""
    makes_plan = (settings.rules, settings.include, settings.exclude, settings.family, settings.algorithms)
    has_other_ranges = settings.range_source != "observed"
    if settings.plan is not None and (any(makes_plan) or has_other_ranges or settings.requantize):
        raise UsageError(
            "--plan applies a plan as it is, but --rules, --include, --exclude, --family, --range-source, --requantize"
            " and --algorithm create one. Use one of them."
        )
    if settings.data is None and settings.samples is not None:
        raise UsageError("--samples limits the samples of --data. Add --data.")
    bounds = (settings.min_sqnr, settings.min_agreement, settings.max_accuracy_drop, settings.max_metric_drop)
    has_bounds = any(bound not in {None, NO_TARGET} for bound in bounds)
    if (settings.strict or has_bounds) and (not settings.validate or settings.data is None):
        raise UsageError("--strict and bounds need the validation. Add --data, and remove --no-validate.")
    if settings.optimize == "latency" and settings.data is None:
        raise UsageError("--optimize latency runs the model on samples. Add --data.")
    if settings.ranges_map is not None and settings.ranges is None:
        raise UsageError("--ranges-map names tensors of the file of --ranges. Add --ranges.")


def _check_inputs(model: Path, settings: InsertOptions) -> None:
    """Read the model, the rules or the plan, and the first sample, which raises errors if one of them is wrong."""
    from graphquant.api.inspect import check_data
    from graphquant.api.models import as_model
    from graphquant.api.plan import plan

    source = as_model(model, settings)
    if settings.plan is None:
        names = [field.name for field in option_fields(PlanOptions)]
        plan(source, PlanOptions(**{name: getattr(settings, name) for name in names}))
    if settings.data is not None:
        check_data(source, settings.data, samples=1)


def _check_outputs(
    model: Path,
    target: Path,
    report: Path | None,
    html: Path | None,
    export_ranges: Path | None,
    *,
    dry_run: bool,
    force: bool,
) -> bool:
    """Reject outputs that cannot be written, before any work is done; return True if the output is a TFLite file."""
    from graphquant import formats
    from graphquant.api.models import check_model_output, check_output

    model_format = formats.detect_format(model)
    to_tflite = model_format == "tensorflow" and target.suffix == ".tflite"
    if to_tflite and not dry_run:
        check_output(target, model, force=force)
    elif not dry_run:
        check_model_output(target, model, model_format, force=force)
    if export_ranges is not None:
        from graphquant.quantize.range_files import check_export_suffix

        check_export_suffix(export_ranges)
    outputs = {target.resolve()}
    for option, path in (("--report", report), ("--export-ranges", export_ranges), ("--html", html)):
        if path is not None:
            check_output(path, model, force=force or path is report)
            if path.resolve() in outputs:
                raise UsageError(f"{option} {path} is also another output. Use another name.")
            outputs.add(path.resolve())
    return to_tflite


def _write_result(
    result: Result,
    target: Path | None,
    *,
    to_tflite: bool,
    io: str | None,
    report: Path | None,
    html: Path | None,
    force: bool,
) -> ConversionReport | None:
    """Write the model, the report and the page; return the report of a conversion to TFLite."""
    conversion = None
    if to_tflite:
        from graphquant.api.convert import convert_to_tflite

        conversion = convert_to_tflite(result, target, force=force, io=io)
    elif target is not None:
        from graphquant.api.models import write_model

        with progress_bar() as progress:
            write_model(result.model, target, force=force, progress=progress, emission=result.serialized_emission)
    if target is not None:
        remember_output(target)
    if report is not None:
        from graphquant.visualize.json_export import InsertResult

        write_text_or_json(report, InsertResult.of(result, str(target) if target else None, conversion).as_json())
    if html is not None:
        from graphquant.visualize.drawing import result_drawing
        from graphquant.visualize.text import result_figures

        write_drawing_page(html, result_drawing(result), result.stats, result_figures(result))
    return conversion


def _print_result(
    result: Result, written: Path | None, conversion: ConversionReport | None, notes: list[str], *, tables: bool
) -> None:
    from graphquant.visualize import text

    print_view(text.result_view(result, tables=tables, to_tflite=conversion is not None))
    print_notes(notes)
    if conversion is not None:
        print_view(text.conversion_view(conversion, tables=tables or not conversion.agrees, written=written))
    ending = f"Written to {written}" if written is not None else "Nothing was written (dry run)."
    click.echo(escape_unprintable(ending))


def _exit_with_result(result: Result, settings: InsertOptions, written_note: str) -> None:
    """Fail if a bound or the quantized share is missed, or with `strict` if a bound is not proven."""
    if result.failures:
        raise FindingsError(f"The validation failed: {'; '.join(result.failures)}. {written_note}")
    minimum = settings.min_quantized
    if minimum is not None and (failure := quantized_share_failure(result.quantized_share, minimum)):
        raise FindingsError(f"{failure}. {written_note}")


@click.command("strip")
@click.argument("model", type=PATH)
@click.option("-o", "--output", type=PATH, help="Write the float model to this path.")
@click.option("--all", "everything", is_flag=True, help="Also remove quantization ops of other tools.")
@click.option(
    "--check",
    "original",
    type=PATH,
    metavar="ORIGINAL",
    help="Verify that the result equals this model. Nothing is written if it differs.",
)
@options_of(SignatureOptions, exclude=("signature",))
@FORCE
def strip_command(
    model: Path, output: Path | None, everything: bool, original: Path | None, force: bool, **reading: Any
) -> None:
    """Remove the quantization that graphquant inserted into MODEL.

    The result is the source model bit for bit if insert kept its weights float. Otherwise it is the prepared model, and
    its weights keep their rounding error. With --check, the exit code is 1 if the result differs from ORIGINAL.
    """
    from graphquant.api.models import check_model_output, load, save
    from graphquant.api.strip import prove_stripped, strip
    from graphquant.formats import detect_format
    from graphquant.visualize.compare_report import strip_proof_view, strip_view

    if output is None and original is None:
        raise UsageError("There is no output for the float model. Use -o OUT, or only --check ORIGINAL.")
    source = load(model, **reading)
    if output is not None:
        check_model_output(output, model, detect_format(model), force=force)
        lock_output_of_command(output)
    stripped = strip(source, everything=everything)
    original_model = None if original is None else load(original, **reading)
    proof = None if original_model is None else prove_stripped(stripped, original_model)
    holds = proof is None or proof.holds
    written = save(stripped.model, output, force=force) if output is not None and holds else None
    if written is not None:
        remember_output(written)
    print_view(strip_view(stripped, written))
    if proof is not None:
        print_view(strip_proof_view(proof, str(original)))
    if not holds:
        message = f"The model differs from {original} in more than rounded weights; see the list above."
        raise FindingsError(f"{message} Nothing was written.")


@click.command("freeze")
@click.argument("model", type=PATH)
@click.option("-o", "--output", type=PATH, required=True, help="Write the frozen graph to this .pb file.")
@options_of(SignatureOptions)
@FORCE
def freeze_command(model: Path, output: Path, force: bool, **reading: Any) -> None:
    """Replace the variables of a TensorFlow MODEL by constants.

    The result is one GraphDef without functions, with the inputs and outputs of the signature. BatchNorms can be folded
    in it, but it cannot be trained.
    """
    from graphquant.api.convert import freeze
    from graphquant.api.models import check_model_output, load, save
    from graphquant.formats import detect_format

    source = load(model, **reading)
    check_model_output(output, model, detect_format(model), force=force, frozen=True)
    lock_output_of_command(output)
    written = save(freeze(source), output, force=force)
    remember_output(written)
    click.echo(f"Written to {written}")
