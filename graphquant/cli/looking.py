"""Commands that show and change nothing: `plan`, `explain`, `inspect`, `data check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphquant.cli.options import CORRECT, selection
from graphquant.cli.output import emit, print_view, write, write_page
from graphquant.errors import FindingsError, UsageError, printable

if TYPE_CHECKING:
    from graphquant.ir import Model

DRAWN = ("dot", "svg", "graphml", "graph-json")
"""Formats that draw a model."""


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@selection
@click.option("--requantize", is_flag=True, help="Take out the quantization that MODEL has already.")
@CORRECT
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Draw it as a page too.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to this file instead of stdout.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def plan(
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
    from graphquant import outputs, pipeline

    for path in (output, html):
        if path is not None:
            outputs.check_output(path, model, force=force)
    _check_page(html, output)
    loaded = pipeline.load(model)
    made = pipeline.plan(
        loaded,
        rules=rules,
        include=include,
        exclude=exclude,
        family=family,
        requantize=requantize,
        correct=correct,
    )
    if html is not None:
        from graphquant.view.graph import plan_drawing

        write_page(html, plan_drawing(pipeline.prepared_for(loaded, made), made))
    if form == "json":
        from graphquant.plans import to_json

        emit(to_json(made), output)
    else:
        from graphquant.view import text

        print_view(text.plan_view(made), output)


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
def explain(
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
    from graphquant import pipeline
    from graphquant.view.explain_text import explain_json, explain_view

    found = pipeline.explain(
        pipeline.load(model), what, rules=rules, plan=plan_file, data=data, stats=stats, backend=backend
    )
    if form == "json":
        emit(explain_json(found), None)
    else:
        print_view(explain_view(found, everything=everything), None)


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--stats", type=click.Path(path_type=Path), metavar="FILE", help="Show these statistics, and what quantizing loses."
)
@click.option("--rules", multiple=True, metavar="NAME|FILE", help="With --stats: the rules that pick the ranges.")
@click.option("--format", "form", type=click.Choice(["text", "json", *DRAWN]), default="text", show_default=True)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Draw it as a page too: docs/viewer.md.")
@click.option("--around", metavar="OP", help="Draw only what is near this op or tensor; as text too.")
@click.option("--hops", type=click.IntRange(min=0), default=2, show_default=True, metavar="N", help="How near.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to this file instead of stdout.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def inspect(
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
    from graphquant import outputs, pipeline
    from graphquant.survey import survey

    for path in (output, html):
        if path is not None:
            outputs.check_output(path, model, force=force)
            outputs.check_output(path, stats, force=force)
    _check_page(html, output)
    if around is not None and form == "json":
        raise UsageError("--format json lists the whole model. For what is near an op take graph-json.")
    if model.suffix == ".gqs":
        _inspect_stats(stats or model, None if stats is None else model, rules, form, html, output)
        return
    if rules and stats is None:
        raise UsageError("--rules is about statistics. Give --stats FILE too, which calibrate writes.")
    loaded = pipeline.load(model)
    drawn = form in DRAWN or around is not None
    if html is not None or drawn:
        _draw(loaded, stats, rules, form if drawn else None, html, (around, hops), output)
    if drawn:
        return
    if stats is not None:
        _inspect_stats(stats, loaded, rules, form, None, output)
    elif form == "json":
        from graphquant.view.data import survey_json

        emit(survey_json(survey(loaded)), output)
    else:
        from graphquant.view import text

        print_view(text.survey_view(survey(loaded)), output)


def _check_page(html: Path | None, output: Path | None) -> None:
    """Refuses a page that would take the place of what is written beside it."""
    if html is not None and output is not None and html.resolve() == output.resolve():
        raise UsageError(f"--html {html} is the file of -o. Give the page another name.")


def _draw(
    loaded: Model,
    stats: Path | None,
    rules: tuple[str, ...],
    form: str | None,
    html: Path | None,
    near: tuple[str | None, int],
    output: Path | None,
) -> None:
    """Draws a model, or the part of it that is `near` an op, as a page, and in a form: a picture, data or text."""
    from graphquant import pipeline
    from graphquant.view.graph import model_drawing, plan_drawing

    picks = None
    if stats is not None:
        picks = pipeline.inspect_stats(stats, loaded, rules=rules, others=html is not None)
    if picks is None or picks.by_name:
        shown, drawing = loaded, model_drawing(loaded, picks)
    else:
        made = pipeline.plan(loaded, rules=rules)
        shown = pipeline.prepared_for(loaded, made)
        drawing = plan_drawing(shown, made, picks)
    chosen: list[int] = []
    what, hops = near
    if what is not None:
        from graphquant.view.around import around

        drawing, chosen = around(drawing, what, hops)
    if html is not None:
        write_page(html, drawing, picks.stats if picks is not None else None)
    if form == "dot":
        from graphquant.view.dot import dot

        emit(dot(shown, drawing if what is not None else None), output)
    elif form == "svg":
        from graphquant.view.graph_svg import svg

        emit(svg(drawing), output)
    elif form in {"graphml", "graph-json"}:
        from graphquant.view import exchange

        emit(exchange.graphml(drawing) if form == "graphml" else exchange.graph_json(drawing), output)
    elif form is not None:
        from graphquant.view.rails import rails_view

        print_view(rails_view(drawing, chosen), output)


def _inspect_stats(
    stats: Path, model: Path | Model | None, rules: tuple[str, ...], form: str, html: Path | None, output: Path | None
) -> None:
    """Shows a statistics file, beside a model where there is one."""
    from graphquant import pipeline
    from graphquant.view.stats_data import picks_json
    from graphquant.view.stats_html import page
    from graphquant.view.stats_text import picks_view

    if form in DRAWN:
        raise UsageError(f"--format {form} draws a model, not statistics. Take text, json or --html FILE.")
    if model is None and rules:
        raise UsageError(f"--rules needs the model: graphquant inspect MODEL --stats {stats}")
    others = html is not None or form == "json"
    picks = pipeline.inspect_stats(stats, model, rules=rules, others=others)
    if html is not None:
        write(html, page(picks))
        click.echo(f"Written to {printable(str(html))}", err=True)
    if form == "json":
        emit(picks_json(picks), output)
    else:
        print_view(picks_view(picks), output)


@click.group()
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

    report = pipeline.check_data(model, spec, samples=samples)
    if form == "json":
        emit(view.report_json(report), None)
    else:
        print_view(view.report_view(report))
    if report.findings:
        raise click.exceptions.Exit(FindingsError.exit_code)
