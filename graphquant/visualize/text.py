"""Terminal text of plans, results, statistics and models.

Tables are readable at 80 columns without color, and mark every omission.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from graphquant.errors import escape_unprintable
from graphquant.ir import MAC_KINDS, Model, fully_known_shape, qualified_op_name
from graphquant.numerics import DynamicQParams, QParams
from graphquant.quantize.plan import SkipCode
from graphquant.rules import load_ruleset, shipped_rule_files
from graphquant.utils.text import format_shape, percent
from graphquant.visualize.compare_report import (
    comparison_figures,
    data_warnings,
    repair_view,
    search_view,
    validation_view,
)
from graphquant.visualize.tables import (
    ROWS_SHOWN,
    Column,
    Row,
    Table,
    format_value_range,
    group_values,
    join_names,
    plain_line,
    pluralize,
)

if TYPE_CHECKING:
    from graphquant.analysis.conversion_report import ConversionReport, ConvertedTensor
    from graphquant.analysis.model_summary import ModelSummary, QuantizationOp, StoredScaleTensor
    from graphquant.api.result import Result
    from graphquant.calibration.stats import Stats
    from graphquant.ir import StoredQuantization, TensorRef
    from graphquant.numerics import Array
    from graphquant.optimize.algorithm import AlgorithmResult
    from graphquant.quantize import Plan, RangeTransfer, Site, Skip
    from graphquant.quantize.rewrite import InsertedPair

CHANGES_SHOWN = 20  # maximum number of changes and conflicts to print
REASONS_SHOWN = 100  # maximum number of reasons to print for skipped tensors
MIN_RULE_ROWS = 3  # rows of the table of a rule after the tables before it have used up all rows
LOW_SQNR = 30.0  # SQNR in dB below which a tensor is listed; 8 bits mostly reach 35 to 50
MIN_DYNAMIC_LSTM_WEIGHTS = 65_536  # number of recurrent weights from which dynamic.toml has an LSTM on integers
FLOAT_OPS_SHOWN = 5  # maximum number of float ops to print
CONVERSIONS_SHOWN = 3  # maximum number of float ops with conversions to print
MAX_TIME_RATIO = 1.05  # time relative to float above which a warning is printed

SKIP_LABELS = {
    SkipCode.COST: "because int8 is estimated to be slower",
    SkipCode.RULE: "by a rule",
    SkipCode.SELECTION: "by --include or --exclude",
    SkipCode.OPTIMIZATION: "by the search or an algorithm",
    SkipCode.TIE: "that must share a scale with a float tensor",
    SkipCode.CAPTURE: "read by a subgraph",
    SkipCode.SCHEME: "of a type that the scheme does not support",
    SkipCode.RANGE: "without a usable range",
    SkipCode.WEIGHT: "that are weights computed at run time",
    SkipCode.BIAS: "that are biases without a usable scale",
}
"""Reasons of skips in the summary. Tensors that were quantized before, and ops that stay as they are, are none."""


def plan_view(plan: Plan) -> RenderableType:
    """Render a plan: preparation steps, a table of sites for each rule, skips, unused rules."""
    sections = [*_preparation_lines(plan), *_rule_tables(plan.sites, PLAN_COLUMNS), *_skip_lines(plan.skips)]
    if plan.algorithms:
        message = f"Optimization algorithms, applied where data shows a gain: {', '.join(plan.algorithms)}"
        sections.append(plain_line(message))
    sections += _unused_rules_lines(plan, shipped=True) + _plan_warnings(plan)
    message = f"{_tensor_counts(plan.sites, 'to quantize')}; {len({skip.tensor for skip in plan.skips})} left in float."
    return Group(*sections, plain_line(message, style="bold"))


def result_view(result: Result, *, tables: bool = True, to_tflite: bool = False) -> RenderableType:
    """Render a result: its sites by rule, unless `tables` is False, and a summary.

    The summary has the extent, the size, the error and the time, then the float tensors, and the warnings last.
    """
    sections = _detail_sections(result) if tables else []
    sections += [*extent_lines(result), *_size_lines(result)]
    sections += [*repair_view(result.search, result.validation), *search_view(result.search, result.validation)]
    if result.inserted:
        runtime_lines = _runtime_lines(result)
        sections += validation_view(result.validation)
        if result.time_ratio is not None and not to_tflite:
            message = f"Time: {result.time_ratio.median:.2f} of the float model's, in ONNX Runtime on this machine."
            sections.append(plain_line(message))
        sections += runtime_lines[: None if tables else 1]
    sections += [] if tables else _count_lines(result)
    if result.tflite_ranges is not None:
        sections += _tflite_ranges(result.tflite_ranges, {skip.tensor for skip in result.skips})
    sections += [plain_line(str(tensor)) for tensor in result.io if not tensor.cache]
    if caches := [tensor for tensor in result.io if tensor.cache]:
        count, per = len(caches), caches[0].cache
        sections.append(plain_line(f"cache: {count} past and present states are int8, with a scale for each {per}"))
    return Group(*sections, *_warning_lines(result, to_tflite=to_tflite))


def _warning_lines(result: Result, *, to_tflite: bool) -> list[RenderableType]:
    """Return the warnings and notes of a result."""
    lines = data_warnings(result.data_findings)
    if result.has_random_data:
        lines.append(plain_line("The ranges come from RANDOM data: use the model for tests only.", style="bold red"))
    if result.stats is not None:
        lines += incomplete_stats(result.stats)
    lines += _worst_activation(result)
    if result.already_quantized:
        message = "The model is quantized already and stays unchanged. --requantize replaces its Q/DQ pairs."
        lines.append(plain_line(message, style="yellow"))
    lines += _unused_rules_lines(result.plan, shipped=False)
    lines += _plan_warnings(result.plan) if result.time_ratio is None else []  # a measured time replaces an estimate
    if result.inserted:
        lines += _fault_lines(result) + _slowdown_lines(result) + _lstm_lines(result)
    if result.inserted and result.model.format == "tensorflow" and not to_tflite:  # no integer kernels for pairs
        message = "note: TensorFlow computes the Q/DQ ops in addition to the float ops, so the result is not faster"
        lines.append(
            plain_line(f"{message} there. -o NAME.tflite writes a file that runs on integers.", style="yellow")
        )
        lines += _unfolded_lines(result)
    if result.unjudged_reason and not result.failures:
        message = f"note: it is unknown whether the runtime accepts the result, because {result.unjudged_reason}"
        lines.append(plain_line(message, style="yellow"))
    return lines


def extent_lines(result: Result) -> list[RenderableType]:
    """Return the number of quantized tensors, and the data that their ranges come from."""
    message = _tensor_counts([pair.site for pair in result.inserted], "quantized")
    samples = pluralize(result.calibration_samples, "sample")
    message += f"; ranges from {samples}" if result.calibration_samples else ""
    message += f" (statistics of {result.stats_path})" if result.stats_path else ""
    return [plain_line(f"{message}.", style="bold")]


def _tensor_counts(sites: Sequence[Site], verb: str) -> str:
    """Return the number of tensors of `sites`, and of activations and constants among them."""
    constants, activations = ({site.tensor for site in sites if site.parameter is flag} for flag in (True, False))
    message = f"{pluralize(len(constants) + len(activations), 'tensor')} {verb}"
    counts = f": {pluralize(len(activations), 'activation')}, {pluralize(len(constants), 'constant')}"
    return message + (counts if sites else "")


def _size_lines(result: Result) -> list[RenderableType]:
    """Return the bytes of all constants before and after, if some are stored as integers."""
    from graphquant.optimize.size_budget import model_constant_bytes  # only results need it

    if not any(pair.folded for pair in result.inserted):
        return []
    before, after = (model_constant_bytes(model) for model in (result.source, result.model))
    return [plain_line(f"Constants: {before:,} -> {after:,} bytes ({percent(after / max(before, 1))}).")]


def result_figures(result: Result) -> list[tuple[str, str]]:
    """Return labels and values of the main figures of a result: error, size, time, share in int8."""
    from graphquant.optimize.size_budget import model_constant_bytes

    comparison = None if result.validation is None else result.validation.comparison
    figures = [] if comparison is None else comparison_figures(comparison)
    if not any(op.kind == "variable" for _, op in result.source.reachable_ops()):  # variables keep their size
        before, after = (model_constant_bytes(model) for model in (result.source, result.model))
        figures.append(("constants", f"{after:,} of {before:,} bytes"))
    if result.time_ratio is not None:
        figures.append(("time", f"{result.time_ratio.median:.2f} of float"))
    if result.quantized_share is not None:
        figures.append(("quantized multiply-adds", percent(result.quantized_share)))
    return figures


def _detail_sections(result: Result) -> list[RenderableType]:
    """Return preparation steps, a table with scale, zero point and range of each site for each rule, and skips."""
    sections = _preparation_lines(result.plan)
    sections += [*_rule_tables(result.inserted, RESULT_COLUMNS, attrgetter("site")), *_skip_lines(result.skips)]
    sections += _algorithm_lines(result.algorithm_results)
    return sections + _limited_lines("changed", result.changes) + _limited_lines("conflict", result.conflicts)


def _count_lines(result: Result) -> list[RenderableType]:
    """Return the counts of what `_detail_sections` lists."""
    counts = {
        # Ops that the runtime fuses read no pair by design.
        "Tensors left in float": Counter(
            SKIP_LABELS[skip.code] for skip in result.skips if not skip.fused and skip.code in SKIP_LABELS
        ),
        "Preparation steps": Counter(step.step for step in result.plan.steps),
        "Ops that preparation keeps": Counter(skip.rule for skip in result.skips if skip.code == SkipCode.PREPARATION),
        "Ops changed by algorithms": Counter(entry.algorithm for entry in result.algorithm_results if entry.applied),
        "Scales changed": Counter({"by the solver": len(result.changes)}),
    }
    lines = [
        f"{label}: {', '.join(f'{count} {reason}' for reason, count in numbers.most_common())}."
        for label, numbers in counts.items()
        if numbers.total()
    ]
    if lines:
        lines.append("  -v lists them, and the scale of each tensor")
    return [*map(plain_line, lines), *_limited_lines("conflict", result.conflicts)]


def _runtime_lines(result: Result) -> list[RenderableType]:
    """Count the ops that the installed ONNX Runtime runs on integers, and list the first costly ones in float."""
    from graphquant.optimize.size_budget import can_examine  # only results need it

    verdicts, counts = result.verdicts, Counter(verdict.status for verdict in result.verdicts)
    if not verdicts and result.model.traits.judgeable and not can_examine(result.model):
        note = "note: the model is too large to examine how ONNX Runtime runs each op."
        return [plain_line(f"{note} check --for onnxruntime does, in up to three times the memory of its weights.")]
    if not verdicts or not result.plan.for_onnxruntime:
        return []
    message = f"ONNX Runtime computes {counts['int8']} of {pluralize(len(verdicts), 'op')} on integers"
    message += f", {counts['fused']} fused into them" if counts["fused"] else ""
    lines = [
        f"  in float: {verdict.location}: {verdict.broken_rule.message}"
        for verdict in verdicts
        if verdict.broken_rule is not None and result.model.graphs[verdict.graph].op(verdict.op).kind in MAC_KINDS
    ]
    if len(lines) > FLOAT_OPS_SHOWN:
        lines[FLOAT_OPS_SHOWN:] = [f"  in float: {len(lines) - FLOAT_OPS_SHOWN} more; --report lists all ops"]
    return [plain_line(line) for line in (f"{message}, and {counts['float']} in float.", *lines)]


def _plan_warnings(plan: Plan) -> list[RenderableType]:
    return [plain_line(f"warning: {warning}", style="yellow") for warning in plan.warnings]


def _fault_lines(result: Result) -> list[RenderableType]:
    """Return a warning if the installed runtime computes ops of the result wrong on this machine."""
    faults = [verdict for verdict in result.verdicts if verdict.fault]
    if not faults:
        return []
    ops = f"{faults[0].location}: " if len(faults) == 1 else f"{faults[0].location} and {len(faults) - 1} other ops: "
    advice = "Use another release, or change the op, before you use it here"
    message = f"warning: {ops}{faults[0].fault}, whatever the model is. {advice}"
    return [plain_line(message, style="yellow")]


def _slowdown_lines(result: Result) -> list[RenderableType]:
    """Return a warning if the result is slower than float on this machine, with the ops that convert most values."""
    ratio = result.time_ratio
    if ratio is None or ratio.median <= MAX_TIME_RATIO:
        return []
    from graphquant.backends.integer_placement import converted_values

    converted = list(converted_values(result.model, result.verdicts).items())[:CONVERSIONS_SHOWN]
    listed = ", ".join(f"{qualified_op_name(*op)} ({count:,})" for op, count in converted)
    message = "warning: the result is slower than float in ONNX Runtime."
    has_activations = not all(site.parameter for site in result.plan.sites)  # weights are converted once, or packed
    message += f" Most values are converted between int8 and float for {listed}." if listed and has_activations else ""
    # Rules without a backend may be for other hardware, which needs the sites that ONNX Runtime computes slowly.
    message += " --optimize latency measures which ops are faster in float." if result.plan.targets else ""
    return [plain_line(f"{message} See docs/howto/slower.md.", style="yellow")]


def _lstm_lines(result: Result) -> list[RenderableType]:
    """Return a note on large float LSTMs, which ONNX Runtime computes on integers only with ranges of each step."""
    count = 0
    for verdict in result.verdicts if result.plan.for_onnxruntime else ():
        graph = result.model.graphs[verdict.graph]
        if verdict.status == "float" and graph.op(verdict.op).kind == "lstm":
            tensor = graph.slots(verdict.op)[graph.op(verdict.op).roles.index("recurrent_weight")]
            shape = None if tensor is None else fully_known_shape(result.model.output(tensor).shape)
            count += math.prod(shape or ()) >= MIN_DYNAMIC_LSTM_WEIGHTS
    message = "ONNX Runtime computes them on integers only with the ranges of each step: --rules dynamic, often faster."
    return [plain_line(f"note: {pluralize(count, 'large LSTM')} in float. {message}", style="yellow")] if count else []


def _unfolded_lines(result: Result) -> list[RenderableType]:
    """Return a note on BatchNorms that stay because of variables. Their biases cannot be corrected either."""
    from graphquant.quantize.fold_batchnorm import VARIABLES_NOT_FOLDED

    count = sum(skip.reason == VARIABLES_NOT_FOLDED for skip in result.skips)
    message = f"note: BatchNorms with variables are not folded: {count}. A frozen model often loses less:"
    command = f"graphquant freeze {shlex.quote(str(result.source.path or 'MODEL'))} -o NAME.pb"
    return [plain_line(f"{message} {command}", style="yellow")] if count else []


def _worst_activation(result: Result) -> list[RenderableType]:
    """Return a warning on the activation with the lowest SQNR if it is low."""
    if (worst := next(iter(result.activations_below(LOW_SQNR)), None)) is None:
        return []
    message = f"warning: {worst.tensor} has the lowest SQNR of the quantized activations, an estimated"
    hint = f"To keep its op float: --exclude {shlex.quote(worst.tensor.op)}"
    return [plain_line(f"{message} {worst.sqnr:.1f} dB. {hint}", style="yellow")]


def _limited_lines(label: str, entries: Sequence[object]) -> list[RenderableType]:
    """Return a line for each change or conflict of the solver, up to a limit."""
    lines: list[RenderableType] = [plain_line(f"{label}: {entry}", style="yellow") for entry in entries[:CHANGES_SHOWN]]
    if len(entries) > CHANGES_SHOWN:
        lines.append(plain_line(f"{label}: {len(entries) - CHANGES_SHOWN} more; --report lists them", style="yellow"))
    return lines


def stats_view(stats: Stats, output: Path) -> RenderableType:
    """Render the statistics that `calibrate` collected."""
    reasons = group_values((stats.missing_reason(tensor), str(tensor)) for tensor in stats.targets)
    lines: list[RenderableType] = [
        plain_line(f"skipped: {join_names(names)}: {reason}", style="yellow")
        for reason, names in reasons.items()
        if reason
    ]
    lines += data_warnings(stats.data_findings)
    if stats.random:
        lines.append(plain_line("The data is RANDOM: use the statistics for tests only.", style="bold red"))
    lines += incomplete_stats(stats)
    sets_text = f", of {pluralize(len(stats.runs), 'set')} of data" if len(stats.runs) > 1 else ""
    message = f"{pluralize(len(reasons.get('', ())), 'tensor')} observed on {pluralize(stats.samples, 'sample')}"
    message += f"{sets_text} in {pluralize(stats.blocks, 'block')}. Written to {output}"
    lines.append(plain_line(message, style="bold"))
    return Group(*lines)


def incomplete_stats(stats: Stats) -> list[RenderableType]:
    """Return a warning if calibration has not run all samples."""
    unfinished = [run for run in stats.runs if not run.complete]
    if not unfinished:
        return []
    if len(unfinished) == 1 and not stats.samples:
        blocks = f"{pluralize(unfinished[0].blocks, 'block')} of {pluralize(unfinished[0].block_size, 'sample')}"
        message = f"The data has {blocks}; this part has none of them."
    else:
        done, total = sum(run.samples_done for run in unfinished), sum(run.samples for run in unfinished)
        message = f"The statistics are of {done} of {total} samples of the data."
    return [plain_line(f"{message} calibrate --merge adds other parts.", style="yellow")]


def conversion_view(
    conversion: ConversionReport, *, tables: bool = True, written: Path | None = None
) -> RenderableType:
    """Render planned and actual parameters of each tensor in TFLite, unless `tables` is False, and float ops."""
    float_ops = [f"float: {float_op.op} ({float_op.type}): {float_op.reason}" for float_op in conversion.float_ops]
    matching = sum(not line.problem for line in conversion.tensors)
    message = f"TFLite file: {written.stat().st_size:,} bytes; " if written is not None else ""
    message += f"{matching} of {pluralize(len(conversion.tensors), 'planned tensor')} match the plan,"
    message += f" {len(conversion.float_ops)} of {pluralize(conversion.op_count, 'op')} stayed float."
    heading = plain_line("Conversion: planned parameters and those of TFLite", style="bold")
    float_lines = [plain_line(line, style="yellow") for line in float_ops]
    lines: list[RenderableType] = [plain_line(message, style="bold")]
    if conversion.validation is not None:
        lines += [plain_line("The file in TFLite's interpreter:"), *validation_view(conversion.validation)]
    if (ratio := conversion.time_ratio) is not None:
        lines.append(plain_line(f"Time: {ratio:.2f} of the float model's file, in TFLite on this machine."))
        if ratio > MAX_TIME_RATIO:
            message = "warning: the file is slower than that of the float model in TFLite. See docs/howto/slower.md."
            lines.append(plain_line(message, style="yellow"))
    lines += [plain_line(f"warning: {warning}.", "bold yellow") for warning in conversion.warnings]
    if not tables:
        return Group(*lines[:1], *float_lines[:FLOAT_OPS_SHOWN], *lines[1:])
    table = Table(CONVERSION_COLUMNS, conversion.tensors)
    return Group(heading, table, *float_lines, *lines)


def _zero_points_text(line: ConvertedTensor) -> str:
    """Return the planned zero point, with that of the runtime in parentheses."""
    zeros = "" if line.planned is None else format_value_range(line.planned[1], "d")
    return zeros + ("" if line.runtime is None else f" ({format_value_range(line.runtime[1], 'd')})")


CONVERSION_COLUMNS: tuple[Column[ConvertedTensor], ...] = (
    Column("tensor", lambda line: line.tensor),
    Column("index", lambda line: line.index, number=True),
    Column("scale", lambda line: line.planned, lambda params: _scale_text(params[0])),
    Column("zero", _zero_points_text),
    Column("runtime", lambda line: line.runtime, lambda params: _scale_text(params[0])),
    Column("verdict", lambda line: line.problem or ("rounded floats" if line.runtime is None else "equal")),
)


def _tflite_ranges(ranges: RangeTransfer, float_tensors: Container[TensorRef]) -> list[RenderableType]:
    exact = sum(applied.exact for applied in ranges.transferred)
    heading = f"{pluralize(len(ranges.transferred), 'tensor')} got their range from {ranges.path or 'the other model'}"
    lines: list[RenderableType] = [plain_line(f"{heading}, {exact} with its exact scale and zero point.")]
    missing = group_values((tensor in float_tensors, str(tensor)) for tensor in ranges.missing)
    labels = {True: "warning: not in that file, so they stay float", False: "not in that file"}
    listed = [("only in that file", ranges.unused), *((labels[key], names) for key, names in missing.items())]
    lines += [plain_line(f"{label}: {join_names(names)}", style="yellow") for label, names in listed if names]
    return lines


def summary_view(summary: ModelSummary) -> RenderableType:
    """Render the summary of a model, with the scale of each quantization op."""
    model = summary.model
    heading = f"{model.path or 'model'}: {model.format}" + (f", opset {model.opset}" if model.opset else "")
    ops = sum(summary.op_types.values())
    graphs = len(model.reachable_graphs())
    heading += f", {pluralize(ops, 'op')} in {pluralize(graphs, 'graph')}"
    lines: list[RenderableType] = [plain_line(heading, style="bold")]
    for title, names in (("inputs ", model.main.inputs), ("outputs", model.main.outputs)):
        signatures = [_tensor_signature(model, name, title.strip() == "outputs") for name in names]
        lines.append(plain_line(f"  {title} {join_names(signatures, 6)}"))
    lines += [plain_line(f"  {tensor}") for tensor in summary.io]
    counts = [f"{count} {kind}" for kind, count in summary.op_types.items()]
    lines.append(plain_line(f"  ops     {join_names(counts, 12)}"))
    if summary.unreachable_functions:
        message = f"  {pluralize(len(summary.unreachable_functions), 'function')} not listed: nothing calls them."
        lines.append(plain_line(message, style="dim"))
    if summary.float_clone_ops:
        clone_graphs = list(dict.fromkeys(float_op.graph for float_op in summary.float_clone_ops))
        message = f"  {pluralize(len(clone_graphs), 'saved function')} skipped: {join_names(clone_graphs)}"
        clone = summary.float_clone_ops[0]
        lines += [plain_line(message, style="yellow"), plain_line(f"    {clone.op}: {clone.reason}", style="dim")]
    tensor_counts = Counter(reading.tensor for reading in summary.distinct_ops)

    def pair_text(op: QuantizationOp) -> str:
        return f"by {op.op}, read by {join_names(list(map(str, op.consumers))) or 'nothing'}"

    for kind, ops_ in group_values((reading.type, reading) for reading in summary.distinct_ops).items():
        table = Table(QUANTIZATION_COLUMNS, ops_, note=lambda op: pair_text(op) if tensor_counts[op.tensor] > 1 else "")
        lines += [plain_line(f"{len(ops_)} {kind}", style="bold"), table]
    lines += _stored_tables(summary)
    lines += _coverage_lines(summary)
    return Group(*lines)


def _stored_tables(summary: ModelSummary) -> list[RenderableType]:
    """Render a table for each graph of tensors that store their own scales."""
    lines: list[RenderableType] = []
    for graph, tensors in group_values((tensor.tensor.graph, tensor) for tensor in summary.tensors).items():
        heading = f"{pluralize(len(tensors), 'tensor')}{f' in {graph}' if graph else ''}"
        lines += [plain_line(heading, style="bold"), Table(STORED_COLUMNS, tensors)]
    return lines


def _rule_tables(
    rows: Iterable[Row], columns: Sequence[Column[Row]], site_of: Callable[[Any], Site] = lambda site: site
) -> list[RenderableType]:
    """Return a table for each rule under its name and reason, in order of first use."""
    sections: list[RenderableType] = []
    remaining = ROWS_SHOWN
    for rule, rule_rows in group_values((site_of(row).rule, row) for row in rows).items():
        heading = plain_line(f"{len(rule_rows)} by rule {rule}", style="bold")
        reason = " ".join(site_of(rule_rows[0]).why.split())
        heading.append(f": {escape_unprintable(reason)}" if reason else "", style="not bold")
        table = Table(columns, rule_rows, max_rows=max(remaining, MIN_RULE_ROWS))
        remaining -= len(rule_rows)
        sections += [heading, table, ""]
    return sections


def _preparation_lines(plan: Plan) -> list[RenderableType]:
    targets_by_step = group_values(
        ((step.step, step.why, step.target == "model"), step.detail if step.target == "model" else step.target)
        for step in plan.steps
    )
    lines: list[RenderableType] = []
    for (name, reason, whole_model), targets in targets_by_step.items():
        heading = name if whole_model else f"{name}, {pluralize(len(targets), 'op')}"
        lines.append(plain_line(f"prepared: {heading}: {join_names(targets)}{f'; {reason}' if reason else ''}"))
    return lines


def _algorithm_lines(results: Sequence[AlgorithmResult]) -> list[RenderableType]:
    """Return a line for each applied optimization algorithm, and for each reason to skip one."""
    applied = group_values((result.algorithm, result.target) for result in results if result.applied)
    skipped = group_values(((entry.algorithm, entry.detail), entry.target) for entry in results if not entry.applied)
    lines = [f"corrected: {name}, {pluralize(len(ops), 'op')}: {join_names(ops)}" for name, ops in applied.items()]
    for (name, reason), ops in skipped.items():
        names = "" if ops == ["model"] else f", {join_names(ops)}"
        lines.append(f"skipped: {name}{names}: {reason.removeprefix('skipped: ')}")
    return list(map(plain_line, lines))


def _skip_lines(skips: Sequence[Skip]) -> list[RenderableType]:
    reasons = group_values(((skip.rule, skip.reason, skip.fused), str(skip.tensor)) for skip in skips)
    lines: list[RenderableType] = [
        plain_line(
            f"skipped: {join_names(tensors)}: {reason} (rule {rule})", style="" if fused or not rule else "yellow"
        )
        for (rule, reason, fused), tensors in reasons.items()
    ]
    if len(lines) > REASONS_SHOWN:
        lines[REASONS_SHOWN:] = [plain_line(f"skipped: {len(lines) - REASONS_SHOWN} more reasons; the JSON lists them")]
    return lines


def _coverage_lines(summary: ModelSummary) -> list[RenderableType]:
    if not summary.coverage:
        return []
    quantized_count = sum(covered.quantized for covered in summary.coverage)
    partly_count = sum(covered.partly_quantized for covered in summary.coverage)
    others = f"; {partly_count} more read some" if partly_count else ""
    message = f"{quantized_count} of {len(summary.coverage)} weighted ops read only quantized tensors{others}."
    lines: list[RenderableType] = [plain_line(message, style="bold")]
    for covered in summary.coverage if quantized_count or partly_count else ():
        # With quantized weights alone, the other inputs of all ops are float.
        if not covered.quantized and (quantized_count or not covered.partly_quantized):
            location = f"{qualified_op_name(covered.graph, covered.op)} ({covered.kind})"
            lines.append(plain_line(f"  float: {location}: {covered.reason}", style="yellow"))
    return lines


def scheme_text(site: Site) -> str:
    """Return type, granularity and range method of a site."""
    scheme = site.scheme
    granularity = f", axis {site.axis}" if site.axis is not None else ""
    granularity += f" in blocks of {scheme.block_size}" if scheme.block_size is not None else ""
    granularity += f", {scheme.args.form}" if scheme.args.form is not None else ""
    shared_uses = (site.clone_of,) if site.clone_of is not None else site.tie
    range_text = "dynamic" if scheme.range == "dynamic" else scheme.observe.name
    range_text += f", {scheme.range}" if scheme.range in {"given", "learned"} else ""
    if shared_uses:
        range_text = f"scale of {join_names([str(use) for use in shared_uses], 1)}"
    range_text += ", scale 2^n" if scheme.scale == "power-of-two" else ""
    return f"{scheme.type.name} {scheme.zero}{granularity}, {range_text}"


def _scale_text(scale: Array) -> str:
    """Return the scale, or the smallest and the largest one."""
    return format_value_range(scale, ".6g", ".4g")


def _dtype_text(params: QParams | DynamicQParams) -> str:
    if isinstance(params, DynamicQParams):
        return params.type.name
    channels = f"[{params.scale.size}] axis {params.axis}" if params.axis is not None else ""
    return params.type.name + channels + (f" by {params.block}" if params.block is not None else "")


def _range_text(params: QParams) -> str:
    low, high = float(params.range.low.min()), float(params.range.high.max())
    # Files do not record whether the lowest integer, such as -128, is excluded.
    symmetric = low < 0 and not params.zero_point.any()
    return f"±{high:.4g}" if symmetric else f"[{low:.4g}, {high:.4g}]"


def _static_params(row: InsertedPair | QuantizationOp) -> QParams | None:
    return row.params if isinstance(row.params, QParams) else None


PARAM_COLUMNS: tuple[Column[Any], ...] = (
    Column("dtype", lambda row: "?" if row.params is None else _dtype_text(row.params)),
    Column(
        "scale",
        lambda row: _static_params(row) or ("dynamic" if row.params else "at run time"),
        lambda params: params if isinstance(params, str) else _scale_text(params.scale),
    ),
    Column("zero", _static_params, lambda params: format_value_range(params.zero_point, "d")),
    Column("range", _static_params, _range_text),
)
"""Columns of rows that have `params`, which are None or dynamic if they are computed at run time."""

PLAN_COLUMNS: tuple[Column[Site], ...] = (
    Column("tensor", lambda site: site.tensor),
    Column("read by", lambda site: join_names(list(map(str, site.uses)))),
    Column("scheme", scheme_text),
)
RESULT_COLUMNS: tuple[Column[InsertedPair], ...] = (Column("tensor", lambda pair: pair.site.tensor), *PARAM_COLUMNS)
QUANTIZATION_COLUMNS: tuple[Column[QuantizationOp], ...] = (
    Column("tensor", lambda op: op.tensor),
    *PARAM_COLUMNS,
    Column("copies", lambda op: 1 + len(op.copies) if op.copies else None, number=True, optional=True),
    Column("learned", lambda op: "learned" if op.learned else None, optional=True),
)


def _stored_dtype_text(tensor: StoredScaleTensor) -> str:
    stored = tensor.stored
    channels = f"[{stored.scale.size}] axis {stored.axis}" if stored.scale.size > 1 else ""
    return (tensor.output.dtype or "?") + channels + (f" by {stored.block}" if stored.block else "")


def _stored_range_text(stored: StoredQuantization) -> str:
    return f"[{stored.low.min():.4g}, {stored.high.max():.4g}]" if stored.low.size and stored.high.size else ""


def _joined_name_text(name: str) -> str:
    """Return the first of the names that TFLite's converter joins for ops that it fuses, and the number of others."""
    first, *others = name.split(";")
    return f"{first} and {len(others)} more" if others else name


STORED_COLUMNS: tuple[Column[StoredScaleTensor], ...] = (
    Column("tensor", lambda tensor: tensor.output.name, _joined_name_text),
    Column("index", lambda tensor: tensor.stored.index, number=True),
    Column("dtype", _stored_dtype_text),
    Column("scale", lambda tensor: _scale_text(tensor.stored.scale) or tensor.stored.details),
    Column("zero", lambda tensor: tensor.stored.zero_point, lambda zeros: format_value_range(zeros, "d")),
    Column("range", lambda tensor: tensor.stored, _stored_range_text),
    Column("shape", lambda tensor: tensor.output.shape or tensor.stored.sizes, format_shape),
)


def _tensor_signature(model: Model, name: str, is_output: bool) -> str:
    graph = model.main
    tensor = graph.slots(name)[0] if is_output else None
    output = graph.output(tensor) if tensor is not None else (graph.op(name).outputs or (None,))[0]
    label = name.removeprefix("@")
    if output is None or output.shape is None:
        return label
    return f"{label} {output.dtype}{format_shape(output.shape)}"


def _unused_rules_lines(plan: Plan, *, shipped: bool) -> list[RenderableType]:
    """List the user's rules without a match, and optionally count shipped ones.

    Shipped rules cover many models, so most of them match nothing in any one model. That is not a mistake.
    """
    shipped_files = [name for name in plan.rules if name in shipped_rule_files()]
    if not plan.unused:
        return []
    user_rules: list[str] = []
    if len(shipped_files) < len(plan.rules):  # else without reading the rule files again
        shipped_rules = {rule.rule.name for rule in load_ruleset(shipped_files).rules}
        user_rules = [name for name in plan.unused if name not in shipped_rules]
    lines: list[RenderableType] = []
    if user_rules:
        lines.append(plain_line(f"Your rules without a match: {', '.join(user_rules)}", "yellow"))
    if shipped and (shipped_count := len(plan.unused) - len(user_rules)):
        message = f"{pluralize(shipped_count, 'shipped rule')} without a match; --format json lists them."
        lines.append(plain_line(message, "dim"))
    return lines
