"""Sensitivity analysis: the error that each quantization alone adds at the outputs of a model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphquant import formats
from graphquant.ir import Model, Op, OpKey, Output, TensorRef, paused_gc
from graphquant.qdq.family import add_constant
from graphquant.quantize.rewrite import FRAME_KINDS

if TYPE_CHECKING:
    from graphquant.analysis import ComparedSites
    from graphquant.calibration.data import Dataset
    from graphquant.formats import Feeds
    from graphquant.numerics import Array

# Switches make the analysis fast: one session serves many quantizations, each enabled by a boolean input of the model.

SWITCH_PREFIX = "graphquant/switch"  # prefix of the names of switch inputs; the index of the quantization follows


class SwitchPoint(NamedTuple):
    """Output of a quantization op that can be bypassed, and the float tensor that it replaces.

    If only integers are stored, `float_source` is a function that returns the float value.
    """

    quantized: TensorRef
    float_source: TensorRef | Callable[[], Array]


class SwitchedModel(NamedTuple):
    """Model with switches, and the name of the switch input by index of the switch point."""

    model: Model
    inputs: Mapping[int, str]

    def feed(self, on: Collection[int] = ()) -> dict[str, Array]:
        """Make the feed that enables only the switch points `on`."""
        return {name: np.array(index in on) for index, name in self.inputs.items()}


def find_switchable(model: Model, switch_points: Sequence[SwitchPoint]) -> list[int]:
    """Find the switch points that an input can control. Functions and TensorFlow 1 frames cannot read new inputs."""
    blind = {
        name
        for name, graph in model.graphs.items()
        if not graph.can_read("") or any(op.kind in FRAME_KINDS for op in graph.ops())
    }
    return [
        index
        for index, (tensor, _) in enumerate(switch_points)
        if blind.isdisjoint({tensor.graph, *(use.graph for use in model.graphs[tensor.graph].consumers(tensor))})
    ]


@paused_gc()
def insert_switches(
    model: Model, switch_points: Sequence[SwitchPoint], *, by_input: Iterable[int], on: Collection[int] = ()
) -> SwitchedModel:
    """Insert switches for some quantizations, keep those in `on`, and bypass all others.

    Quantizations at the indices `by_input`, which must be `find_switchable`, get a switch.
    """
    changed, inputs = model.copy(), {}
    replacements: dict[TensorRef, TensorRef] = {}
    with_switch = set(by_input)
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
        if index in with_switch:
            inputs[index] = _add_switch_input(changed, index)
            replacement = _add_select_op(changed, inputs[index], quantized, replacement)
        graph.reroute(quantized, uses, replacement)
        replacements[quantized] = replacement
    return SwitchedModel(model=changed, inputs=inputs)


def _add_switch_input(model: Model, index: int) -> str:
    """Add a boolean input to the main graph; it is false by default if the format supports defaults."""
    main = model.main
    name = main.unique_name(f"{SWITCH_PREFIX}_{index}")
    if model.traits.named_values:
        main.add_op(Op(name=name, kind="input", type="", roles=(), outputs=(Output(name, "bool", ()),)))
    else:
        default = add_constant(main, f"{name}/off", np.array(0, np.bool_), op_type="Const", rule="")
        fields: dict[str, Any] = {"attrs": {"shape": ()}, "outputs": (Output(f"{name}:0", "bool", ()),)}
        main.add_op(Op(name=name, kind="input", type="PlaceholderWithDefault", **fields), [default])
    main.inputs.append(name)
    return name


def _add_select_op(model: Model, switch: str, quantized: TensorRef, float_tensor: TensorRef) -> TensorRef:
    """Add an op that selects `quantized` if the switch is true, else `float_tensor`."""
    graph = model.graphs[quantized.graph]
    name = graph.unique_name(f"{switch}/select")
    output = replace(model.output(quantized), name=name if model.traits.named_values else f"{name}:0")
    op = Op(name=name, kind="where", type=model.traits.select_type, roles=("condition", "input"), outputs=(output,))
    return graph.add_op(op, [TensorRef("", switch), quantized, float_tensor])


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
    runs: int  # number of runs, including the references
    samples: int  # number of samples
    interrupted: bool = False  # True if Ctrl-C ended the analysis early

    def sqnr(self, graph: str, op: str) -> float | None:
        """SQNR in dB of the outputs with this quantization alone; None if unknown."""
        error = self.errors.get((graph, op))
        if error is None or math.isnan(error):
            return None
        return -10 * math.log10(error) if error else math.inf


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
    feeds = list(_chunk_sample_feeds(batches, inputs, batch_independent=batch_independent))
    selected = [index for index, op_key in enumerate(op_keys) if only is None or op_key in only]
    errors: dict[OpKey, float] = {}
    runs, interrupted = 0, False
    try:
        for index, error, run_count in _measure_each(quantized_model, switch_points, selected, feeds):
            errors[op_keys[index]] = error
            runs += run_count
            if progress is not None:
                progress(len(errors), len(selected))
    except KeyboardInterrupt:
        interrupted = True
    samples = len(feeds)
    if batch_independent:
        samples = sum(next((len(value) for value in feed.values() if value.ndim), 1) for feed in feeds)
    return Sensitivity(errors=errors, runs=runs, samples=samples, interrupted=interrupted)


def _measure_each(
    quantized_model: Model, switch_points: Sequence[SwitchPoint], selected: Collection[int], feeds: Sequence[Feeds]
) -> Iterator[tuple[int, float, int]]:
    """Yield index, error and number of new runs for each switch point in `selected`."""
    remaining = set(selected)
    with_switch = [index for index in find_switchable(quantized_model, switch_points) if index in remaining]
    for start in range(0, len(with_switch), SWITCHES_PER_SESSION):
        group = with_switch[start : start + SWITCHES_PER_SESSION]
        variant = insert_switches(quantized_model, switch_points, by_input=group)
        session = _SwitchSession(variant.model, feeds, variant.feed())
        for index in group:
            yield index, session.relative_error(session, variant.feed({index})), session.take_run_count()
    reference: _SwitchSession | None = None
    for index in sorted(remaining - set(with_switch)):
        reference_runs = 0
        if reference is None:
            reference = _SwitchSession(insert_switches(quantized_model, switch_points, by_input=()).model, feeds, {})
            reference_runs = reference.take_run_count()
        variant = insert_switches(quantized_model, switch_points, by_input=(), on={index})
        isolated = _SwitchSession(variant.model, feeds, None)
        yield index, isolated.relative_error(reference, {}), reference_runs + isolated.take_run_count()


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


def _chunk_sample_feeds(batches: Dataset, inputs: Mapping[str, str], *, batch_independent: bool) -> Iterator[Feeds]:
    """Prepare a few samples, spread over the data and batched if possible."""
    count = min(batches.count, MAX_BATCHES * BATCH_SIZE if batch_independent else MAX_SAMPLES)
    chosen = sorted({index * batches.count // count for index in range(count)})
    samples: Iterator[Feeds] = (
        {name: feed[source] for name, source in inputs.items()}
        for feed in (next(batches.feeds_between(index, index + 1)) for index in chosen)
    )
    while chunk := list(islice(samples, BATCH_SIZE if batch_independent else 1)):
        shapes = {tuple((name, value.shape) for name, value in sample_feed.items()) for sample_feed in chunk}
        if len(chunk) > 1 and len(shapes) == 1:
            yield {name: np.concatenate([sample_feed[name] for sample_feed in chunk]) for name in chunk[0]}
        else:
            yield from chunk


class _SwitchSession:
    """Session of a model with the samples it runs on. With `reference_switches`, the model computes the reference."""

    def __init__(self, model: Model, feeds: Sequence[Feeds], reference_switches: Feeds | None) -> None:
        self._runner = formats.format_module(model.format).create_runner(model)
        self._feeds = feeds
        self._runs = 0
        self.references = [] if reference_switches is None else [self._run(feed, reference_switches) for feed in feeds]

    def _run(self, feed: Feeds, switches: Feeds) -> dict[str, Array]:
        self._runs += 1
        return self._runner.run({**feed, **switches})

    def take_run_count(self) -> int:
        """Return the number of runs since the last call."""
        runs, self._runs = self._runs, 0
        return runs

    def relative_error(self, reference: _SwitchSession, switches: Feeds) -> float:
        """Largest relative squared error of a float output over all samples; NaN if there is none."""
        power, error = defaultdict[str, float](float), defaultdict[str, float](float)
        for feed, expected in zip(self._feeds, reference.references, strict=True):
            actual = self._run(feed, switches)
            for name, value in expected.items():
                if value.dtype.kind == "f":
                    output_power, output_error = _power_and_error(value, actual.get(name))
                    power[name] += output_power
                    error[name] += output_error
        shares = [error[name] / power[name] if power[name] else (math.inf if error[name] else 0.0) for name in power]
        return max(shares, default=math.nan)


def _power_and_error(expected: Array, actual: Array | None) -> tuple[float, float]:
    """Sum of squares of an output and of its error. An output of another shape counts as completely wrong."""
    flat = expected.astype(np.float64).reshape(-1)
    power = float(flat @ flat)
    if actual is None or actual.shape != expected.shape:
        return power, power
    with np.errstate(invalid="ignore", over="ignore"):
        difference = actual.astype(np.float64).reshape(-1) - flat
        return power, float(difference @ difference)
