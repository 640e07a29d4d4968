"""`insert_command`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphquant.cli.options import ALGORITHM, MAX_MEMORY, SHARE, parse_max_memory, require_finite, selection_options
from graphquant.cli.output import print_view, progress_bar, write_drawing_page, write_text_or_json
from graphquant.errors import FindingsError, UsageError

if TYPE_CHECKING:
    from graphquant.api import Result


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Default: MODEL's name with .quant in it.")
@selection_options
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
    "--stats",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Statistics from calibrate; --data is then for the check and for corrections.",
)
@click.option("--method", metavar="NAME", help="How ranges are picked from the data, whatever the rules say.")
@MAX_MEMORY
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
@click.option("--requantize", is_flag=True, help="Take out the quantization that MODEL has already.")
@ALGORITHM
@click.option("--no-check", is_flag=True, help="Calibrate on all samples, and do not measure what was made.")
@click.option(
    "--min-sqnr",
    type=float,
    callback=require_finite,
    metavar="DB",
    help="Find the cheapest plan with that; exit code 1 if an output has less.",
)
@click.option(
    "--min-agreement",
    type=SHARE,
    callback=require_finite,
    metavar="SHARE",
    help="Likewise, of top-1 agreement: 0.99, or 99 for percent.",
)
@click.option(
    "--max-accuracy-drop",
    type=click.FloatRange(0, 100),
    callback=require_finite,
    metavar="POINTS",
    help="Likewise, of accuracy by the data's labels, in points of 100.",
)
@click.option(
    "--optimize",
    type=click.Choice(["macs", "size", "latency"]),
    default="macs",
    show_default=True,
    help="What a plan that meets the bounds costs least of: multiply-adds in float, bytes of weights, or time on this"
    " machine, which needs no bound.",
)
@click.option(
    "--size-budget",
    metavar="SIZE",
    help="Bytes that weights may take, 2MB or 25% of the float model's: 4 bits, 8 bits or float for each.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Exit code 1 if an output has less than 20 dB in the check, or it is not sure that bounds are met.",
)
@click.option("--dry-run", is_flag=True, help="Do everything but write.")
@click.option("--report", type=click.Path(path_type=Path), metavar="FILE", help="Write what was done as JSON.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Draw the result as a page.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def insert_command(  # click passes what the user gave
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
    requantize: bool,
    correct: tuple[str, ...],
    no_check: bool,
    min_sqnr: float | None,
    min_agreement: float | None,
    max_accuracy_drop: float | None,
    optimize: str,
    size_budget: str | None,
    strict: bool,
    dry_run: bool,
    report: Path | None,
    html: Path | None,
    force: bool,
) -> None:
    """Quantize MODEL: plan, calibrate, rewrite, check, write.

    With data, the last fifth of it is kept for the check, at least 4 samples of 8 or more. With a bound, as
    --min-sqnr, and data to calibrate with, the cheapest plan that meets it is searched for; docs/search.md says how.
    """
    if plan_file is not None and (rules or include or exclude or family or requantize or correct):
        raise UsageError(
            "--plan applies a plan as it is; --rules, --include, --exclude, --family, --requantize and --correct make"
            " one. Give either."
        )
    if data is None and samples is not None:
        raise UsageError("--samples counts samples of --data. Give that too.")
    bounds = (min_sqnr, min_agreement, max_accuracy_drop)
    if (strict or bounds != (None, None, None)) and (no_check or data is None):
        raise UsageError("--strict and bounds are for the check, which takes --data. Give that, and no --no-check.")
    if optimize == "latency" and data is None:
        raise UsageError("--optimize latency runs the model on a sample. Give --data.")
    if ranges_map is not None and ranges is None:
        raise UsageError("--ranges-map names tensors of the file that --ranges gives. Give that too.")
    from graphquant import api
    from graphquant.api import models

    target = output or models.default_output(model)
    to_tflite = _check_outputs(model, target, report, html, dry_run=dry_run, force=force)
    source = api.load(model)
    if to_tflite:
        from graphquant.api import convert

        source = convert.freeze(source)
    with progress_bar() as progress:
        result = api.insert(
            source,
            rules=rules,
            data=data,
            stats=stats,
            plan=plan_file,
            method=method,
            samples=samples,
            max_memory=parse_max_memory(max_memory),
            ranges=ranges,
            ranges_map=ranges_map,
            include=include,
            exclude=exclude,
            family=family,
            float_weights=float_weights,
            requantize=requantize,
            algorithms=correct,
            validate=not no_check,
            min_sqnr=min_sqnr,
            min_agreement=min_agreement,
            max_accuracy_drop=max_accuracy_drop,
            optimize=optimize,
            runtime="tflite" if to_tflite else None,
            size_budget=size_budget,
            progress=progress,
        )
    _write_and_print(result, target, to_tflite=to_tflite, report=report, html=html, dry_run=dry_run, force=force)
    validation = result.validation or (result.search.search_validation if result.search is not None else None)
    if validation is not None and validation.failures and (strict or validation.bounds):
        raise FindingsError(f"The check is missed: {'; '.join(validation.failures)}. {_written_note(target, dry_run)}")
    search_result = result.search
    if search_result is not None and not (
        search_result.bounds_met if strict else search_result.search_validation.confirmed
    ):
        message = "; ".join(search_result.search_validation.failures or search_result.search_validation.caveats)
        raise FindingsError(
            f"The search does not show that the bounds are met: {message}. {_written_note(target, dry_run)}"
        )


def _check_outputs(
    model: Path, target: Path, report: Path | None, html: Path | None, *, dry_run: bool, force: bool
) -> bool:
    """Refuses outputs that cannot be written, before any work is done; tells whether a TFLite file is to be made."""
    from graphquant import formats
    from graphquant.api import models

    model_format = formats.detect_format(model)
    to_tflite = model_format == "tensorflow" and target.suffix == ".tflite"
    if to_tflite and not dry_run:
        models.check_output(target, model, force=force)
    elif not dry_run:
        models.check_model_output(target, model, model_format, force=force)
    if report is not None:
        models.check_output(report, model, force=True)
        if report.resolve() == target.resolve():
            raise UsageError(f"--report {report} is the output itself. Give the report another name.")
    if html is not None:
        models.check_output(html, model, force=force)
        if html.resolve() in {target.resolve(), report.resolve() if report is not None else None}:
            raise UsageError(f"--html {html} is another of the outputs. Give the page another name.")
    return to_tflite


def _written_note(target: Path, dry_run: bool) -> str:
    """What there is all the same."""
    return "Nothing was written." if dry_run else f"{target} was written all the same."


def _write_and_print(
    result: Result,
    target: Path,
    *,
    to_tflite: bool,
    report: Path | None,
    html: Path | None,
    dry_run: bool,
    force: bool,
) -> None:
    """Writes what insert made, as a TFLite file with its receipt where asked, and tells what was done."""
    from graphquant.visualize import json_export as view_data
    from graphquant.visualize import text

    conversion_report, written = None, None if dry_run else target
    if to_tflite:
        from graphquant.api import convert

        conversion_report = convert.convert_to_tflite(result, written, force=force)
    elif written is not None:
        written = result.save(target, force=force)
    if report is not None:
        write_text_or_json(report, view_data.result_json(result, str(written) if written else None, conversion_report))
    if html is not None:
        from graphquant.visualize.model_drawing import result_drawing

        write_drawing_page(html, result_drawing(result), result.stats)
    print_view(text.result_view(result, written))
    if conversion_report is not None:
        print_view(text.conversion_view(conversion_report))
    if conversion_report is not None and not conversion_report.agrees:
        raise FindingsError(
            f"{target.name} does not have every scale that was planned; the table above has the runtime's beside"
            " them. Leave those tensors with --exclude, or give them the runtime's ranges."
        )
