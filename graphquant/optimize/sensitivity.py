"""Sensitivity analysis: the error that each quantization alone adds at the outputs of a model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphquant import formats
from graphquant.analysis.measured_outputs import (
    compared_outputs,
    find_scores,
    has_label_scores,
    with_scores,
    with_selections,
)
from graphquant.ir import FLOAT_TYPES, Model, Op, OpKey, Output, TensorRef, Use, paused_gc
from graphquant.qdq.family import add_constant
from graphquant.quantize.preparation_undo import remove_unread_ops
from graphquant.quantize.rewrite import FRAME_KINDS, add_barriers

if TYPE_CHECKING:
    from graphquant.analysis.site_errors import ComparedSites
    from graphquant.calibration.data import Dataset
    from graphquant.formats import Feeds, Runner
    from graphquant.numerics import Array

# Switches make the analysis fast: one session serves many quantizations, each enabled by a boolean input of the model.

SWITCH_PREFIX = "graphquant/switch"  # prefix of the names of switch inputs; the number of the switch follows


class SwitchPoint(NamedTuple):
    """Output of a quantization op that can be bypassed, and the float tensor that it replaces.

    If only integers are stored, `float_source` is a function that returns the float value.
    """

    quantized: TensorRef
    float_source: TensorRef | Callable[[], Array]


class SwitchedModel(NamedTuple):
    """Model with switches, and the name of the input by number of the switch."""

    model: Model
    inputs: Mapping[int, str]

    def feed(self, on: Collection[int] = ()) -> dict[str, Array]:
        """Make the feed that enables only the switches `on`."""
        return {name: np.array(number in on) for number, name in self.inputs.items()}


def find_switchable(model: Model, switch_points: Sequence[SwitchPoint]) -> list[int]:
    """Find the switch points that an input can control: neither in functions of ONNX nor in TensorFlow 1 frames.

    Calls in a frame cannot wait for an assignment outside of it, so functions count as blind if there may be any.
    """
    blind = {name for name, graph in model.graphs.items() if any(op.kind in FRAME_KINDS for op in graph.ops())}
    if model.traits.named_values or "" in blind:
        blind.update(name for name, graph in model.graphs.items() if not graph.can_read(""))
    return [
        index
        for index, (tensor, _) in enumerate(switch_points)
        if blind.isdisjoint({tensor.graph, *(use.graph for use in model.graphs[tensor.graph].consumers(tensor))})
    ]


@paused_gc()
def insert_switches(
    model: Model, switch_points: Sequence[SwitchPoint], *, by_input: Mapping[int, int], on: Collection[int] = ()
) -> SwitchedModel:
    """Insert switches for some quantizations, keep those in `on`, and bypass all others.

    `by_input` has the number of the switch by index of the quantization, which must be `find_switchable`. Several
    quantizations may share a switch.
    """
    changed = replace(model.copy(), provenance=model.provenance)  # with its integer inputs and outputs
    inputs: dict[int, str] = {}
    replacements: dict[TensorRef, TensorRef] = {}
    for index, switch_point in enumerate(switch_points):
        if index in on:
            continue
        quantized, float_source = switch_point
        graph = changed.graphs[quantized.graph]
        uses = graph.consumers(quantized)
        if isinstance(float_source, TensorRef):
            replacement = replacements.get(float_source, float_source)
        else:
            name, constant_type = graph.unique_name(f"{quantized.op}/float"), changed.traits.constant_type
            replacement = add_constant(graph, name, float_source(), op_type=constant_type, rule="")
        if index in by_input:
            number = by_input[index]
            if number not in inputs:
                inputs[number] = _add_switch_input(changed, number)
            reader = TensorRef("", inputs[number])
            if not graph.can_read(""):
                from graphquant.formats.tensorflow.session import add_input_reader

                reader = add_input_reader(changed, graph, reader)
            name = graph.unique_name(f"{inputs[number]}/select")
            output = replace(changed.output(quantized), name=name if changed.traits.named_values else f"{name}:0")
            op_type, roles = changed.traits.select_type, ("condition", "input")
            select = Op(name=name, kind="where", type=op_type, roles=roles, outputs=(output,))
            replacement = graph.add_op(select, [reader, quantized, replacement])
        graph.reroute(quantized, uses, replacement)
        replacements[quantized] = replacement
    return SwitchedModel(model=changed, inputs=inputs)


def _add_switch_input(model: Model, number: int) -> str:
    """Add a boolean input to the main graph; it is false by default if the format supports defaults."""
    main = model.main
    name = main.unique_name(f"{SWITCH_PREFIX}_{number}")
    if model.traits.named_values:
        main.add_op(Op(name=name, kind="input", type="", roles=(), outputs=(Output(name, "bool", ()),)))
    else:
        default = add_constant(main, f"{name}/off", np.array(0, np.bool_), op_type="Const", rule="")
        output, op_type = Output(f"{name}:0", "bool", ()), "PlaceholderWithDefault"
        main.add_op(Op(name=name, kind="input", type=op_type, attrs={"shape": ()}, outputs=(output,)), [default])
    main.inputs.append(name)
    return name


MAX_SAMPLES = 12  # samples per quantization if samples run one by one
MAX_BATCHES = 4  # runs per quantization if samples run in batches
BATCH_SIZE = 16  # samples in a batch
SWITCHES_PER_SESSION = 16
"""Switches per session. A disabled switch costs time in each run, and so does each new session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Result of a sensitivity analysis."""

    # Squared error that each quantization op adds alone, as a share of the output's power, for the output where it is
    # largest; by graph and name of the op.
    errors: Mapping[OpKey, float]
    samples: int  # number of samples
    interrupted: bool = False  # True if Ctrl-C ended the analysis early

    def sqnr(self, graph: str, op: str) -> float | None:
        """SQNR in dB of the outputs with this quantization alone; None if unknown."""
        error = self.errors.get((graph, op))
        return None if error is None or math.isnan(error) else error_to_db(error)


def measure_sensitivity(
    quantized_model: Model,
    sites: ComparedSites,
    batches: Dataset,
    *,
    inputs: Mapping[str, str],
    batch_independent: bool,
    only: Collection[OpKey] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Sensitivity:
    """Measure the error of each quantization alone: the model with only this one, compared with the model without any.

    Switch inputs select the quantization within a session. Quantizations that no input can control, as in a function,
    get a session of their own. All are measured on the same samples, spread over the data, so that samples with large
    errors affect all alike. Ctrl-C ends the analysis with the results so far. `sites` are the quantizations matched
    with the float model, `only` those to measure (all by default), and `inputs` the input of the float model by input
    of the quantized one. `batch_independent` allows batches of samples. Raises a ModelError if a model cannot be run.
    """
    op_keys, switch_points = _find_switch_points(quantized_model, sites)
    feeds = list(chunk_sample_feeds(batches, inputs, batch_independent=batch_independent))
    samples = len(feeds)
    if batch_independent:
        samples = sum(next((len(value) for value in feed.values() if value.ndim), 1) for feed in feeds)
    switchable = set(find_switchable(quantized_model, switch_points))
    selected = [index for index, op_key in enumerate(op_keys) if only is None or op_key in only]
    selected.sort(key=lambda index: index not in switchable)
    errors: dict[OpKey, float] = {}
    interrupted = False
    try:
        for start in range(0, len(selected), SWITCHES_PER_SESSION):
            measured = [op_keys[index] for index in selected[start : start + SWITCHES_PER_SESSION]]
            switches = GroupSwitches(quantized_model, sites, [[op_key] for op_key in measured], feeds, samples)
            for number, op_key in enumerate(measured):
                errors[op_key] = switches.measure_error(frozenset([number]))
                if progress is not None:
                    progress(len(errors), len(selected))
    except KeyboardInterrupt:
        interrupted = True
    return Sensitivity(errors=errors, samples=samples, interrupted=interrupted)


def judge_corrected_biases(
    quantized_model: Model, sites: ComparedSites, feeds: Sequence[Feeds], samples: int, sensitivity: Sensitivity
) -> Sensitivity:
    """Return the sensitivity with the biases that bias correction changed, judged together in the whole model.

    A corrected bias cancels the mean error of other quantizations. Alone, it would be an error where there is nothing
    to cancel. Each of them gets the error that all of them together add to the model with all other quantizations.
    """
    corrected = {(site.quantization_op.graph, site.quantization_op.op) for site in sites.sites if site.corrected}
    corrected &= sensitivity.errors.keys()
    if not corrected:
        return sensitivity
    groups = [corrected, sensitivity.errors.keys() - corrected]
    switches = GroupSwitches(quantized_model, sites, groups, feeds, samples)
    error = max(0.0, switches.error((0, 1)) - switches.error((1,)))
    errors = {**sensitivity.errors, **dict.fromkeys(corrected, error)}
    return replace(sensitivity, errors=errors)


class SiteBypass:
    """A quantized model whose sites can be bypassed, as in a plan that keeps them in float."""

    def __init__(
        self,
        quantized_model: Model,
        sites: ComparedSites,
        ops_by_site: Mapping[int, Collection[OpKey]],
        *,
        with_barriers: bool = False,
    ) -> None:
        """Bypass sites of `quantized_model`; `ops_by_site` has the quantization ops of each site of its plan.

        `with_barriers` adds the barriers that a plan for ONNX Runtime has before its float ops.
        """
        op_keys, self._switch_points = _find_switch_points(quantized_model, sites)
        self._model, self._with_barriers = quantized_model, with_barriers
        indices = {op_key: index for index, op_key in enumerate(op_keys)}
        self._points = {
            site: {indices[op_key] for op_key in ops if op_key in indices} for site, ops in ops_by_site.items()
        }

    def make_model(self, float_sites: Collection[int]) -> Model:
        """Return the model with these sites in float."""
        bypassed = {point for site in float_sites for point in self._points.get(site, ())}
        on = set(range(len(self._switch_points))) - bypassed
        model = insert_switches(self._model, self._switch_points, by_input={}, on=on).model
        remove_unread_ops(model, [self._switch_points[point].quantized for point in sorted(bypassed)])
        if self._with_barriers:
            add_barriers(model)
        return model


# The error of groups of quantizations takes one run for each set of groups, whatever the number of quantizations.


class GroupSwitches:
    """A quantized model with a switch for each group of quantizations, and the samples that it runs on."""

    def __init__(
        self,
        quantized_model: Model,
        sites: ComparedSites,
        groups: Sequence[Collection[OpKey]],
        feeds: Sequence[Feeds],
        samples: int,
        *,
        counts_scores: bool = False,
    ) -> None:
        """Insert a switch for each of `groups`, which contain quantization ops. Quantizations in no group are bypassed.

        `feeds` contain this number of samples. `counts_scores` counts the error of the scores behind a softmax, or a
        sigmoid of labels, if it is less, as an `OutputMeter` does. Raises a ModelError if the model cannot be run.
        """
        runner = formats.format_module(quantized_model.format).create_runner(quantized_model)
        self._scores = find_scores(runner) if counts_scores else {}
        self._selecting_runner = with_selections(runner)  # switches would hide the peaks of a map from the search
        op_keys, self._switch_points = _find_switch_points(quantized_model, sites)
        group_of = {op_key: number for number, group in enumerate(groups) for op_key in group}
        numbers = {index: group_of[op_key] for index, op_key in enumerate(op_keys) if op_key in group_of}
        switchable = set(find_switchable(quantized_model, self._switch_points))
        self._model = quantized_model
        self._by_input = {index: number for index, number in numbers.items() if index in switchable}
        # No input reaches quantizations in functions. Each set of them takes a session of its own.
        self._fixed = {index: number for index, number in numbers.items() if index not in switchable}
        self.groups = frozenset(numbers.values())  # groups with a quantization whose float tensor is known
        self._feeds = feeds
        # Number of samples and of their batches, and True if each set of groups takes a session of its own, because no
        # input reaches some quantizations.
        self.size = samples, len(feeds), bool(self._fixed)
        self._reference: _SwitchSession | None = None
        self._session: tuple[frozenset[int], _SwitchSession, SwitchedModel] | None = None
        self._errors: dict[frozenset[int], float] = {frozenset(): 0.0}

    @property
    def runs(self) -> int:
        """Number of runs."""
        return (len(self._errors) - 1) * len(self._feeds)

    def is_measured(self, on: Collection[int]) -> bool:
        """Return True if the error of these groups is known."""
        return frozenset(on) in self._errors

    def error(self, on: Collection[int]) -> float:
        """Squared error that the groups `on` add, as a share of the power of the output where it is largest.

        It is infinite if an output has NaN or infinite values.
        """
        key = frozenset(on)
        if key not in self._errors:
            error = self.measure_error(key)
            self._errors[key] = math.inf if math.isnan(error) else error
        return self._errors[key]

    def measure_error(self, on: frozenset[int]) -> float:
        """Measure the error that the groups `on` add; NaN if no output is a float."""
        fixed = frozenset(index for index, number in self._fixed.items() if number in on)
        if self._session is None or self._session[0] != fixed:
            variant = insert_switches(self._model, self._switch_points, by_input=self._by_input, on=fixed)
            is_reference = self._reference is None and not fixed
            reference_switches = variant.feed() if is_reference else None
            session = _SwitchSession(
                variant.model, self._feeds, reference_switches, self._scores, self._selecting_runner
            )
            self._session = fixed, session, variant
            if is_reference:  # with all switches off, the model is the float model
                self._reference = session
        if self._reference is None:
            variant = insert_switches(self._model, self._switch_points, by_input={})
            self._reference = _SwitchSession(variant.model, self._feeds, {}, self._scores, self._selecting_runner)
        _, session, variant = self._session
        return session.relative_error(self._reference, variant.feed(on & variant.inputs.keys()))


def error_to_db(error: float) -> float:
    """Return the SQNR in dB of an error that is a share of the outputs' power."""
    return -10 * math.log10(error) if error else math.inf


MIN_SPLIT_SHARE = 0.02  # share of the whole error below which a run of groups is not split
MAX_ERROR = 1e6  # error that stands for infinity, so that sums and differences stay finite

ErrorPart = tuple[tuple[int, ...], float]  # groups that were measured together, and their error


def bisect_errors(
    measure: Callable[[Collection[int]], float],
    blocks: Sequence[Sequence[int]],
    max_measurements: int,
    min_error: float = 0.0,
    float_cost: Callable[[Collection[int]], float] = lambda _groups: 1.0,
) -> list[ErrorPart]:
    """Estimate the errors that groups add, with few measurements.

    Rounding errors are nearly independent, so those of two groups add up. The groups are measured together. Then the
    run of blocks with the largest product of error and cost is split, and both parts are measured, until the limit is
    reached or no part matters. A single block is split into its groups in the same way.

    A cheap part of a large error becomes float in any case, and an expensive one of a small error never does.

    Args:
        measure: Returns the error with only the given groups quantized.
        blocks: The groups of each block, in graph order.
        max_measurements: Maximum number of calls of `measure`, at least 1.
        min_error: Error up to which a part is not split.
        float_cost: Returns the cost of some groups in float. By default all parts cost the same.

    Returns:
        Parts that contain each group once. A group of its own part was measured alone.
    """
    whole = tuple(tuple(block) for block in blocks if block)
    if not whole:
        return []

    def measure_part(part: tuple[tuple[int, ...], ...]) -> float:
        return min(measure([group for block in part for group in block]), MAX_ERROR)

    parts = [(measure_part(whole), whole)]
    smallest_error = max(MIN_SPLIT_SHARE * parts[0][0], min_error)

    def uncertainty(entry: tuple[float, tuple[tuple[int, ...], ...]]) -> float:
        return entry[0] * float_cost([group for block in entry[1] for group in block])

    for _ in range((max_measurements - 1) // 2):
        splittable = [entry for entry in parts if len(entry[1]) > 1 or len(entry[1][0]) > 1]
        splittable = [entry for entry in splittable if entry[0] > smallest_error]
        if not splittable:
            break
        error, part = max(splittable, key=uncertainty)
        position = parts.index((error, part))
        if len(part) > 1:
            halves = (part[: len(part) // 2], part[len(part) // 2 :])
        else:
            middle = len(part[0]) // 2
            halves = ((part[0][:middle],), (part[0][middle:],))
        parts[position : position + 1] = [(measure_part(half), half) for half in halves]
    return [(tuple(group for block in part for group in block), error) for error, part in parts]


def share_errors(parts: Sequence[ErrorPart], noise: Mapping[int, float] | None = None) -> dict[int, float]:
    """Divide the error of each part among its groups, in proportion to their `noise`, or equally without it."""
    noise = noise or dict.fromkeys((group for groups, _ in parts for group in groups), 1.0)
    totals = [math.fsum(noise[group] for group in groups) for groups, _ in parts]
    shares = [(groups, error / total) for (groups, error), total in zip(parts, totals, strict=True)]
    return {group: share * noise[group] for groups, share in shares for group in groups}


def _find_switch_points(quantized_model: Model, sites: ComparedSites) -> tuple[list[OpKey], list[SwitchPoint]]:
    """Find the quantizations with a known float tensor."""
    op_keys, switch_points = [], []
    for site in sites.sites:
        float_tensor = site.read_float_weight if site.input_tensor is None else site.input_tensor
        shapes = (quantized_model.output(tensor).shape for tensor in (site.input_tensor, site.output_tensor) if tensor)
        if site.input_tensor is not None and len(set(shapes)) > 1:
            float_tensor = site.quantization_op.tensor  # a weight that is quantized in another view
        if float_tensor is not None:
            op_keys.append((site.quantization_op.graph, site.quantization_op.op))
            switch_points.append(SwitchPoint(quantized=site.output_tensor, float_source=float_tensor))
    return op_keys, switch_points


def chunk_sample_feeds(
    batches: Dataset,
    inputs: Mapping[str, str],
    *,
    batch_independent: bool,
    max_samples: int | None = None,
    batch_size: int = BATCH_SIZE,
) -> Iterator[Feeds]:
    """Prepare a few samples, spread over the data and batched if possible."""
    if max_samples is None:
        max_samples = MAX_BATCHES * BATCH_SIZE if batch_independent else MAX_SAMPLES
    count = min(batches.count, max_samples)
    chosen = sorted({index * batches.count // count for index in range(count)})
    samples: Iterator[Feeds] = (
        {name: feed[source] for name, source in inputs.items()}
        for feed in (next(batches.feeds_between(index, index + 1)) for index in chosen)
    )
    while chunk := list(islice(samples, batch_size if batch_independent else 1)):
        shapes = {tuple((name, value.shape) for name, value in sample_feed.items()) for sample_feed in chunk}
        if len(chunk) > 1 and len(shapes) == 1:
            yield {name: np.concatenate([sample_feed[name] for sample_feed in chunk]) for name in chunk[0]}
        else:
            yield from chunk


class _SwitchSession:
    """Session of a model with the samples it runs on. With `reference_switches`, the model computes the reference."""

    def __init__(
        self,
        model: Model,
        feeds: Sequence[Feeds],
        reference_switches: Feeds | None,
        scores: Mapping[str, Use],
        selecting_runner: Runner,
    ) -> None:
        """Return outputs, or what `selecting_runner` compares in their place, and `scores` by name of the output."""
        runner = with_selections(formats.format_module(model.format).create_runner(model), selecting_runner)
        self._runner, self._score_names = with_scores(runner, scores)
        self._scores = scores
        self._feeds = feeds
        self.references: list[dict[str, Array]] = []
        if reference_switches is not None:
            self.references += [self._runner.run({**feed, **reference_switches}) for feed in feeds]

    def relative_error(self, reference: _SwitchSession, switches: Feeds) -> float:
        """Largest relative squared error of a float output over all samples; NaN if there is none."""
        power, error = defaultdict[str, float](float), defaultdict[str, float](float)
        self._runner.start_sequence()
        compared = compared_outputs(self._runner, self._runner, {name: name for name in self._runner.outputs})
        for feed, expected in zip(self._feeds, reference.references, strict=True):
            actual = self._runner.run({**feed, **switches})
            for name in compared:
                if (value := expected.get(name)) is not None and value.dtype.name in FLOAT_TYPES:
                    output_power, output_error = _power_and_error(value, actual.get(name))
                    power[name] += output_power
                    error[name] += output_error
        shares = {
            name: error[name] / power[name] if power[name] else (math.inf if error[name] else 0.0) for name in power
        }
        for name, scores in self._score_names.items():
            share, values = shares.pop(scores, math.inf), (outputs[name] for outputs in reference.references)
            if name in shares and has_label_scores(self._runner.model, self._scores[name], values):
                shares[name] = min(shares[name], share)
        return max(shares.values(), default=math.nan)


def _power_and_error(expected: Array, actual: Array | None) -> tuple[float, float]:
    """Sum of squares of an output and of its error. An output of another shape counts as completely wrong."""
    flat = expected.astype(np.float64).reshape(-1)
    power = float(flat @ flat)
    if actual is None or actual.shape != expected.shape:
        return power, power
    with np.errstate(invalid="ignore", over="ignore"):
        difference = actual.astype(np.float64).reshape(-1) - flat
        return power, float(difference @ difference)
