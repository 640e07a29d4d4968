"""Commands that show and change nothing: `plan`, `explain_command`, `inspect_command`, `data check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphquant.cli.options import ALGORITHM, selection_options
from graphquant.cli.output import print_view, write_drawing_page, write_or_print, write_text_or_json
from graphquant.errors import FindingsError, UsageError, escape_unprintable

if TYPE_CHECKING:
    from graphquant.ir import Model


GRAPH_FORMATS = ("dot", "svg", "graphml", "graph-json")
"""Formats that draw a model."""


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@selection_options
@click.option("--requantize", is_flag=True, help="Take out the quantization that MODEL has already.")
@ALGORITHM
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Draw it as a page too.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to this file instead of stdout.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def plan_command(
    model: Path,
    rules: tuple[str, ...],
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    family: str | None,
    requantize: bool,
    correct: tuple[str, ...],
    form: str,
    html: Path | None,
    output: Path | None,
    force: bool,
) -> None:
    """Show what insert would do to MODEL. --format json gives a plan that insert --plan applies."""
    from graphquant import api
    from graphquant.api import models

    for path in (output, html):
        if path is not None:
            models.check_output(path, model, force=force)
    _check_page_path(html, output)
    source = api.load(model)
    quantization_plan = api.plan(
        source,
        rules=rules,
        include=include,
        exclude=exclude,
        family=family,
        requantize=requantize,
        algorithms=correct,
    )
    if html is not None:
        from graphquant.visualize.model_drawing import plan_drawing

        write_drawing_page(html, plan_drawing(api.prepare_for_plan(source, quantization_plan), quantization_plan))
    if form == "json":
        from graphquant.quantize import plan_to_json

        write_or_print(plan_to_json(quantization_plan), output)
    else:
        from graphquant.visualize import text

        print_view(text.plan_view(quantization_plan), output)


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("what", metavar="TENSOR|OP")
@click.option("--rules", multiple=True, metavar="NAME|FILE", help="Rule file; repeat it to stack, first match wins.")
@click.option(
    "--plan", "plan_file", type=click.Path(path_type=Path), metavar="FILE", help="Explain this plan instead of rules."
)
@click.option("--data", metavar="SPEC", help="Calibration data: explain scales too, as insert would choose them.")
@click.option(
    "--stats", type=click.Path(path_type=Path), metavar="FILE", help="Statistics from calibrate, in place of --data."
)
@click.option("--for", "backend", metavar="BACKEND", help="What is to run it; by default what the rules are for.")
@click.option("--all", "everything", is_flag=True, help="List every rule that did not apply.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def explain_command(
    model: Path,
    what: str,
    rules: tuple[str, ...],
    plan_file: Path | None,
    data: str | None,
    stats: Path | None,
    backend: str | None,
    everything: bool,
    form: str,
) -> None:
    """Tell why TENSOR, or what is around OP, is quantized as it is.

    That is which rule took each use and which came close, and what a backend will make of it. With --data or --stats it
    also says why the scale is what it is: what it is tied to, and what had to be raised.
    Of a MODEL that is quantized already it tells what is in it.
    """
    if data is not None and stats is not None:
        raise UsageError("--stats takes the place of --data. Give either.")
    if plan_file is not None and rules:
        raise UsageError("--plan explains a plan as it is; --rules makes one. Give either.")
    from graphquant import api
    from graphquant.visualize.explain_report import explain_json, explain_view

    explanation = api.explain(
        api.load(model), what, rules=rules, plan=plan_file, data=data, stats=stats, backend=backend
    )
    if form == "json":
        write_or_print(explain_json(explanation), None)
    else:
        print_view(explain_view(explanation, all_rules=everything), None)


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--stats", type=click.Path(path_type=Path), metavar="FILE", help="Show these statistics, and what quantizing loses."
)
@click.option("--rules", multiple=True, metavar="NAME|FILE", help="With --stats: the rules that pick the ranges.")
@click.option(
    "--format", "form", type=click.Choice(["text", "json", *GRAPH_FORMATS]), default="text", show_default=True
)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Draw it as a page too: docs/viewer.md.")
@click.option("--around", metavar="OP", help="Draw only what is near this op or tensor; as text too.")
@click.option("--hops", type=click.IntRange(min=0), default=2, show_default=True, metavar="N", help="How near.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to this file instead of stdout.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
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
) -> None:
    """Show MODEL's quantization ops, and what stays float. Each with its dtype, scale, zero point and range.

    --html draws the model as a page to look around in, --format svg, dot, graphml and graph-json for documents and
    other tools.

    With --stats, or a statistics file (.gqs) as MODEL, show a histogram of each tensor that was calibrated instead,
    with the range that insert would give it, what that clips and loses, the worst first.
    """
    from graphquant import api
    from graphquant.analysis.model_summary import summarize_model
    from graphquant.api import models

    for path in (output, html):
        if path is not None:
            models.check_output(path, model, force=force)
            models.check_output(path, stats, force=force)
    _check_page_path(html, output)
    if around is not None and form == "json":
        raise UsageError("--format json lists the whole model. For what is near an op take graph-json.")
    if model.suffix == ".gqs":
        _print_stats(stats or model, None if stats is None else model, rules, form, html, output)
        return
    if rules and stats is None:
        raise UsageError("--rules is about statistics. Give --stats FILE too, which calibrate writes.")
    source = api.load(model)
    draws_graph = form in GRAPH_FORMATS or around is not None
    if html is not None or draws_graph:
        _draw_model(source, stats, rules, form if draws_graph else None, html, (around, hops), output)
    if draws_graph:
        return
    if stats is not None:
        _print_stats(stats, source, rules, form, None, output)
    elif form == "json":
        from graphquant.visualize.json_export import summary_json

        write_or_print(summary_json(summarize_model(source)), output)
    else:
        from graphquant.visualize import text

        print_view(text.summary_view(summarize_model(source)), output)


def _check_page_path(html: Path | None, output: Path | None) -> None:
    """Refuses a page that would take the place of what is written beside it."""
    if html is not None and output is not None and html.resolve() == output.resolve():
        raise UsageError(f"--html {html} is the file of -o. Give the page another name.")


def _draw_model(
    source: Model,
    stats: Path | None,
    rules: tuple[str, ...],
    form: str | None,
    html: Path | None,
    near_op: tuple[str | None, int],
    output: Path | None,
) -> None:
    """Draws a model, or the part of it that is `near_op` an op, as a page, and in a form: a picture, data or text."""
    from graphquant import api
    from graphquant.visualize.model_drawing import model_drawing, plan_drawing

    range_report = None
    if stats is not None:
        range_report = api.inspect_stats(stats, source, rules=rules, compare_methods=html is not None)
    if range_report is None or range_report.matched_by_name:
        drawn_model, drawing = source, model_drawing(source, range_report)
    else:
        resolved_plan = api.plan(source, rules=rules)
        drawn_model = api.prepare_for_plan(source, resolved_plan)
        drawing = plan_drawing(drawn_model, resolved_plan, range_report)
    highlighted: list[int] = []
    center, hops = near_op
    if center is not None:
        from graphquant.visualize.model_drawing import neighborhood

        drawing, highlighted = neighborhood(drawing, center, hops)
    if html is not None:
        write_drawing_page(html, drawing, range_report.stats if range_report is not None else None)
    if form == "dot":
        from graphquant.visualize.graph_export import graphviz_dot

        write_or_print(graphviz_dot(drawn_model, drawing if center is not None else None), output)
    elif form == "svg":
        from graphquant.visualize.svg import graph_svg

        write_or_print(graph_svg(drawing), output)
    elif form in {"graphml", "graph-json"}:
        from graphquant.visualize import graph_export

        write_or_print(
            graph_export.graph_graphml(drawing) if form == "graphml" else graph_export.graph_json(drawing), output
        )
    elif form is not None:
        from graphquant.visualize.ascii_graph import ascii_graph

        print_view(ascii_graph(drawing, highlighted), output)


def _print_stats(
    stats: Path, model: Path | Model | None, rules: tuple[str, ...], form: str, html: Path | None, output: Path | None
) -> None:
    """Shows a statistics file, beside a model where there is one."""
    from graphquant import api
    from graphquant.visualize.statistics_report import range_report_json, range_report_view, stats_page

    if form in GRAPH_FORMATS:
        raise UsageError(f"--format {form} draws a model, not statistics. Take text, json or --html FILE.")
    if model is None and rules:
        raise UsageError(f"--rules needs the model: graphquant inspect MODEL --stats {stats}")
    compare_methods = html is not None or form == "json"
    range_report = api.inspect_stats(stats, model, rules=rules, compare_methods=compare_methods)
    if html is not None:
        write_text_or_json(html, stats_page(range_report))
        click.echo(f"Written to {escape_unprintable(str(html))}", err=True)
    if form == "json":
        write_or_print(range_report_json(range_report), output)
    else:
        print_view(range_report_view(range_report), output)


@click.group()
def data_group() -> None:
    """Look at calibration data."""


@data_group.command("check")
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("spec")
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Look at the first N samples only.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def data_check_command(model: Path, spec: str, samples: int | None, form: str) -> None:
    """Show what SPEC feeds each input of MODEL, and what is probably wrong with it. Exit code 1 if anything is."""
    from graphquant import api
    from graphquant.visualize import check_report as view

    report = api.check_data(model, spec, samples=samples)
    if form == "json":
        write_or_print(view.data_check_json(report), None)
    else:
        print_view(view.data_check_view(report))
    if report.findings:
        raise click.exceptions.Exit(FindingsError.exit_code)
