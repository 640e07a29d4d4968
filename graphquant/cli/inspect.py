"""Commands that change nothing: `plan`, `explain`, `inspect`, `data check` and `rules`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphquant.cli.options import (
    FORCE,
    HTML,
    OUTPUT,
    PATH,
    GroupedCommand,
    NameType,
    collect_options,
    example_lines,
    format_option,
    options_of,
)
from graphquant.cli.output import print_notes, print_view, write_drawing_page, write_or_print, write_page, write_result
from graphquant.errors import FindingsError, UsageError
from graphquant.utils.options import RULE_NAMES, ExplainOptions, PlanOptions, SignatureOptions

if TYPE_CHECKING:
    from graphquant.ir import Model

GRAPH_FORMATS = ("dot", "svg", "graphml", "graph-json")  # formats that draw a model


@click.command(
    "plan",
    cls=GroupedCommand,
    epilog=example_lines(
        "plan model.onnx",
        "plan model.onnx --rules tensorrt --exclude 'head/*'",
        "plan model.onnx --format json -o plan.json",
    ),
)
@click.argument("model", type=PATH)
@options_of(PlanOptions)
@format_option("json")
@HTML
@OUTPUT
@FORCE
def plan_command(model: Path, form: str, html: Path | None, output: Path | None, force: bool, **values: Any) -> None:
    """Show the changes that insert would make to MODEL.

    insert --plan applies the plan that --format json writes.
    """
    from graphquant.api.models import as_model, omission_notes
    from graphquant.api.plan import plan, prepare_for_plan

    settings = collect_options(PlanOptions, values)
    source = as_model(model, settings, defers=html is None)
    model_plan = plan(source, settings)
    _check_paths(model, html, output, force=force)
    if html is not None:
        from graphquant.visualize.drawing import plan_drawing

        write_drawing_page(html, plan_drawing(prepare_for_plan(source, model_plan), model_plan))
    if form == "json":
        from graphquant.quantize import plan_to_json

        write_or_print(plan_to_json(model_plan), output)
    else:
        from graphquant.visualize import text

        print_view(text.plan_view(model_plan), output)
        print_notes(omission_notes(source))


@click.command("explain")
@click.argument("model", type=PATH)
@click.argument("name", metavar="TENSOR|OP")
@options_of(ExplainOptions)
@click.option("--all", "everything", is_flag=True, help="List every rule that does not apply.")
@format_option("json")
def explain_command(model: Path, name: str, everything: bool, form: str, **values: Any) -> None:
    """Explain the quantization of TENSOR, or of tensors around OP.

    The output lists the rule of each use, the rules that almost applied, and a prediction of the backend's behavior.
    With --data or --stats, it also explains each scale: the tensors with which it is shared, and the limits that
    raised it. A MODEL that is quantized already is described as it is.
    """
    settings = collect_options(ExplainOptions, values)
    if settings.data is not None and settings.stats is not None:
        raise UsageError("--stats replaces --data. Use one of them.")
    if settings.plan is not None and settings.rules:
        raise UsageError("--plan explains a plan as it is, but --rules creates one. Use one of them.")
    from graphquant.api.inspect import explain
    from graphquant.visualize.check_report import explain_view

    explanation = explain(model, name, settings)
    if form == "json":
        write_result("explain", explanation)
    else:
        print_view(explain_view(explanation, all_rules=everything), None)


@click.command("inspect")
@click.argument("model", type=PATH)
@click.option(
    "--stats", type=PATH, metavar="FILE", help="Show these statistics, and the error of each quantized tensor."
)
@click.option(
    "--rules",
    multiple=True,
    type=NameType(RULE_NAMES, files=True),
    metavar="NAME|FILE",
    help="With --stats: rules that compute the ranges.",
)
@format_option("json", *GRAPH_FORMATS)
@HTML
@click.option("--around", metavar="OP", help="Draw only the neighborhood of this op or tensor; also as text.")
@click.option(
    "--hops",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    metavar="N",
    help="Size of the neighborhood, in edges.",
)
@options_of(SignatureOptions, exclude=("signature",))
@OUTPUT
@FORCE
def inspect_command(
    model: Path,
    stats: Path | None,
    rules: tuple[str, ...],
    form: str,
    html: Path | None,
    around: str | None,
    hops: int,
    output: Path | None,
    force: bool,
    **reading: Any,
) -> None:
    """Show the quantization ops of MODEL, and its float ops.

    Each quantization op has a dtype, scale, zero point and range. --html draws the model as an interactive page
    (docs/viewer.md). --format svg, dot, graphml and graph-json are for documents and other tools.

    With --stats, or with a statistics file (.gqs) as MODEL, inspect shows the histogram of each calibrated tensor, the
    range that insert would choose, the clipped share and the error, largest error first.
    """
    from graphquant.analysis.model_summary import summarize_model
    from graphquant.api.models import load

    if around is not None and form == "json":
        raise UsageError("--format json lists the whole model. For a neighborhood, use --format graph-json.")
    if model.suffix == ".gqs":
        _check_paths(model, html, output, force=force, stats=stats)
        _print_stats(stats or model, None if stats is None else model, rules, form, html, output)
        return
    if rules and stats is None:
        raise UsageError("--rules computes ranges from statistics. Add --stats FILE, which calibrate writes.")
    source = load(model, **reading)
    _check_paths(model, html, output, force=force, stats=stats)
    draws_graph = form in GRAPH_FORMATS or around is not None
    if html is not None or draws_graph:
        _draw_model(source, stats, rules, form if draws_graph else None, html, (around, hops), output)
    if draws_graph:
        return
    if stats is not None:
        _print_stats(stats, source, rules, form, None, output)
    elif form == "json":
        write_result("inspect", summarize_model(source), output)
    else:
        from graphquant.visualize import text

        print_view(text.summary_view(summarize_model(source)), output)


def _check_paths(
    model: Path, html: Path | None, output: Path | None, *, force: bool, stats: Path | None = None
) -> None:
    """Reject outputs that cannot be written, and a page that is also the other output."""
    from graphquant.api.models import check_output

    for path in filter(None, (output, html)):
        check_output(path, model, force=force)
        check_output(path, stats, force=force)
    if html is not None and output is not None and html.resolve() == output.resolve():
        raise UsageError(f"--html {html} is also the file of -o. Use another name for the page.")


def _draw_model(
    source: Model,
    stats: Path | None,
    rules: tuple[str, ...],
    form: str | None,
    html: Path | None,
    near_op: tuple[str | None, int],
    output: Path | None,
) -> None:
    """Draw a model, or the neighborhood of an op, as a page and in a graph format or as text."""
    from graphquant.visualize.drawing import model_drawing, neighborhood, plan_drawing

    report = None
    if stats is not None:
        from graphquant.api.inspect import inspect_stats

        report = inspect_stats(stats, source, rules=rules, compare_methods=html is not None)
    if report is None or report.matched_by_name:
        drawn_model, drawing = source, model_drawing(source, report)
    else:
        from graphquant.api.plan import plan, prepare_for_plan

        model_plan = plan(source, rules=rules)
        drawn_model = prepare_for_plan(source, model_plan)
        drawing = plan_drawing(drawn_model, model_plan, report)
    highlighted: list[int] = []
    center, hops = near_op
    if center is not None:
        drawing, highlighted = neighborhood(drawing, center, hops)
    if html is not None:
        write_drawing_page(html, drawing, report.stats if report is not None else None)
    if form is None:
        return
    from graphquant.visualize import graph_export

    if form == "dot":
        write_or_print(graph_export.graphviz_dot(drawn_model, drawing if center is not None else None), output)
    elif form == "svg":
        write_or_print(graph_export.graph_svg(drawing), output)
    elif form == "graphml":
        write_or_print(graph_export.graph_graphml(drawing), output)
    elif form == "graph-json":
        write_or_print(graph_export.graph_json(drawing), output)
    else:
        print_view(graph_export.AsciiGraph(drawing, highlighted), output)


def _print_stats(
    stats: Path, model: Path | Model | None, rules: tuple[str, ...], form: str, html: Path | None, output: Path | None
) -> None:
    """Show a statistics file, with the ranges for a model if there is one."""
    from graphquant.api.inspect import inspect_stats
    from graphquant.visualize.statistics_report import range_report_view, stats_page

    if form in GRAPH_FORMATS:
        raise UsageError(f"--format {form} draws a model, not statistics. Use text, json or --html FILE.")
    if model is None and rules:
        raise UsageError(f"--rules needs the model: graphquant inspect MODEL --stats {stats}")
    compare_methods = html is not None or form == "json"
    report = inspect_stats(stats, model, rules=rules, compare_methods=compare_methods)
    if html is not None:
        write_page(html, stats_page(report))
    if form == "json":
        write_result("inspect --stats", report, output)
    else:
        print_view(range_report_view(report), output)


@click.group("data")
def data_group() -> None:
    """Inspect calibration data."""


@data_group.command("check")
@click.argument("model", type=PATH)
@click.argument("spec")
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Check only the first N samples.")
@options_of(SignatureOptions)
@format_option("json")
def data_check_command(model: Path, spec: str, samples: int | None, form: str, **reading: Any) -> None:
    """Show the data that SPEC feeds to each input of MODEL, and probable mistakes.

    Exit code 1 if there are probable mistakes.
    """
    from graphquant.api.inspect import check_data
    from graphquant.api.models import load
    from graphquant.visualize import check_report as view

    report = check_data(load(model, **reading), spec, samples=samples)
    if form == "json":
        write_result("data check", report)
    else:
        print_view(view.data_check_view(report))
    if report.findings:
        raise click.exceptions.Exit(FindingsError.exit_code)


@click.group("rules")
def rules_group() -> None:
    """List, show and check rule files; print their JSON Schema."""


@rules_group.command("list")
def rules_list_command() -> None:
    """List the shipped rule files."""
    from rich.table import Table

    from graphquant.rules import load_ruleset, shipped_rule_files

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("rules", justify="right")
    table.add_column("description")
    for name in shipped_rule_files():
        ruleset = load_ruleset([name])
        table.add_row(name, str(len(ruleset.rules)), ruleset.descriptions[0])
    print_view(table)


@rules_group.command("show")
@click.argument("name", type=NameType(RULE_NAMES))
def rules_show_command(name: str) -> None:
    """Print the rule file NAME."""
    from graphquant.rules import find_rule_file

    click.echo(find_rule_file(name).read_text("utf-8"), nl=False)


@rules_group.command("check")
@click.argument("files", nargs=-1, required=True, type=NameType(RULE_NAMES, files=True), metavar="NAME|FILE...")
def rules_check_command(files: tuple[str, ...]) -> None:
    """Check rule files and list each mistake as file:line."""
    from graphquant.backends.onnxruntime_costs import read_cost_table
    from graphquant.rules import load_ruleset

    ruleset = load_ruleset(list(files))
    count = len(ruleset.rules)
    if ruleset.costs:
        read_cost_table(ruleset.costs)  # raises an error about a file that is none
    click.echo(f"{', '.join(files)}: no mistakes in {count} rule{'' if count == 1 else 's'}.")


@rules_group.command("schema")
def rules_schema_command() -> None:
    """Print the JSON Schema of rule files, for editors."""
    from graphquant.rules import rule_file_schema

    click.echo(json.dumps(rule_file_schema(), indent=2))
