"""Blame: the error that each quantization adds alone at the outputs of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from graphquant import formats
from graphquant.ir import Op, Output, TensorRef, paused_gc
from graphquant.qdq.family import add_constant
from graphquant.quantize.rewrite import FRAME_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from graphquant.analysis import ComparedSites
    from graphquant.calibration.data import Dataset
    from graphquant.formats import Feeds
    from graphquant.ir import Model
    from graphquant.numerics import Array

    OpKey = tuple[str, str]


# A quantized model in which each quantization is taken out, left in, or switched by an input of the model.

SWITCH_PREFIX = "graphquant/switch"
"""What the inputs are called, each with the number of its quantization."""

SELECT_OP_TYPES = {"onnx": "Where", "tensorflow": "SelectV2"}
"""The op that takes its second input where the first is true, else its third."""

CONSTANT_OP_TYPES = {"onnx": "Constant", "tensorflow": "Const"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SwitchPoint:
    """A quantization of a model, and what there is without it.

    Attributes:
        quantized: What it makes.
        float_source: The float tensor that it stands for; what gives the values where the model stores integers alone.
    """

    quantized: TensorRef
    float_source: TensorRef | Callable[[], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchedModel:
    """A model with switches.

    Attributes:
        model: The model.
        inputs: For each choice that has a switch, by its position, the input that is its switch.
    """

    model: Model
    inputs: Mapping[int, str]

    def feed(self, on: Collection[int] = ()) -> dict[str, Array]:
        """The inputs that leave the choices `on` quantized, and no other that has a switch."""
        return {name: np.array(index in on) for index, name in self.inputs.items()}


def find_switchable(model: Model, switch_points: Sequence[SwitchPoint]) -> list[int]:
    """The positions of the choices that an input can rule: not those in functions, nor in TensorFlow 1's frames."""
    blind = {
        name
        for name, graph in model.graphs.items()
        if not graph.can_read("") or any(op.kind in FRAME_KINDS for op in graph.ops())
    }
    return [
        index
        for index, switch_point in enumerate(switch_points)
        if not {*_graphs_of_switch(model, switch_point)} & blind
    ]


@paused_gc()
def insert_switches(
    model: Model, switch_points: Sequence[SwitchPoint], *, by_input: Iterable[int], on: Collection[int] = ()
) -> SwitchedModel:
    """`model` with some quantizations behind switches, those `on` as they are, and all others taken out.

    Args:
        model: The quantized model.
        switch_points: Its quantizations.
        by_input: Positions of those that get a switch; they must be `find_switchable`.
        on: Positions of those that stay.
    """
    changed, inputs = model.copy(), {}
    replacements: dict[TensorRef, TensorRef] = {}
    with_switch = set(by_input)
    for index, switch_point in enumerate(switch_points):
        if index in on:
            continue
        uses = changed.graphs[switch_point.quantized.graph].consumers(switch_point.quantized)
        replacement = _make_float_tensor(changed, switch_point, replacements)
        if index in with_switch:
            inputs[index] = _add_switch_input(changed, index)
            replacement = _add_select_op(changed, inputs[index], switch_point.quantized, replacement)
        changed.graphs[switch_point.quantized.graph].reroute(switch_point.quantized, uses, replacement)
        replacements[switch_point.quantized] = replacement
    return SwitchedModel(model=changed, inputs=inputs)


def _graphs_of_switch(model: Model, switch_point: SwitchPoint) -> set[str]:
    """The graphs that make and read what is chosen."""
    quantized = switch_point.quantized
    return {quantized.graph, *(use.graph for use in model.graphs[quantized.graph].consumers(quantized))}


def _make_float_tensor(
    model: Model, switch_point: SwitchPoint, replacements: Mapping[TensorRef, TensorRef]
) -> TensorRef:
    """The float tensor in place of a quantized one."""
    if isinstance(switch_point.float_source, TensorRef):
        return replacements.get(switch_point.float_source, switch_point.float_source)
    graph = model.graphs[switch_point.quantized.graph]
    name = graph.unique_name(f"{switch_point.quantized.op}/float")
    return add_constant(graph, name, switch_point.float_source(), op_type=CONSTANT_OP_TYPES[model.format], rule="")


def _add_switch_input(model: Model, index: int) -> str:
    """A new boolean input of the main graph, off by default where the format has such."""
    main = model.main
    name = main.unique_name(f"{SWITCH_PREFIX}_{index}")
    if model.format == "onnx":
        main.add_op(Op(name=name, kind="input", type="", roles=(), outputs=(Output(name, "bool", ()),)))
    else:
        default = add_constant(main, main.unique_name(f"{name}/off"), np.array(0, np.bool_), op_type="Const", rule="")
        outputs = (Output(f"{name}:0", "bool", ()),)
        main.add_op(
            Op(name=name, kind="input", type="PlaceholderWithDefault", attrs={"shape": ()}, outputs=outputs), [default]
        )
    main.inputs.append(name)
    return name


def _add_select_op(model: Model, switch: str, quantized: TensorRef, float_tensor: TensorRef) -> TensorRef:
    """Adds an op that is `quantized` where the switch is on, else `float_tensor`."""
    graph = model.graphs[quantized.graph]
    name = graph.unique_name(f"{switch}/select")
    output = replace(model.output(quantized), name=name if model.format == "onnx" else f"{name}:0")
    op = Op(
        name=name, kind="where", type=SELECT_OP_TYPES[model.format], roles=("condition", "input"), outputs=(output,)
    )
    return graph.add_op(op, [TensorRef("", switch), quantized, float_tensor])


MAX_SAMPLES = 12
"""Samples on which each quantization is tried, where samples are run one by one."""

MAX_BATCHES = 4
"""Runs of each quantization where samples are run in batches."""

BATCH_SIZE = 16
"""Samples in such a batch."""

SWITCHES_PER_SESSION = 16
"""Quantizations that have switches in one session: each takes time also while it is off, and a session takes more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What each quantization adds.

    Attributes:
        errors: For graph and name of each quantization op the squared error that it adds alone to the outputs, as a
            share of their squares; of the output where that is largest.
        runs: How many runs there were for all, references included.
        samples: On how many samples.
        interrupted: Whether it was stopped before all were tried.
    """

    errors: Mapping[OpKey, float]
    runs: int
    samples: int
    interrupted: bool = False

    @property
    def runs_per_op(self) -> float:
        """How many runs that is for each quantization."""
        return self.runs / max(len(self.errors), 1)

    def sqnr(self, graph: str, op: str) -> float | None:
        """The signal to noise in decibels that the outputs have with this quantization alone; None if not known."""
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
    """Tries each quantization alone: the model with all others taken out, beside the model with all taken out.

    Quantizations are switched by inputs of one session for some of them; each that no input can rule, as in a
    function, gets a session of its own. All are tried on the same samples, spread over the data, so that those that
    make more of any error make more of all. Ctrl-C ends that with what is known so far.

    Args:
        quantized_model: The quantized model.
        sites: Its quantizations beside the float model.
        batches: The data, with the inputs of the float model.
        inputs: For each input of `quantized_model` that of the float model.
        batch_independent: Whether samples may be joined.
        only: The quantizations to try, all by default.
        progress: Told how many quantizations are done, and of how many.

    Raises:
        ModelError: A model cannot be run.
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
    samples = sum(_count_rows(feed) if batch_independent else 1 for feed in feeds)
    return Sensitivity(errors=errors, runs=runs, samples=samples, interrupted=interrupted)


def _measure_each(
    quantized_model: Model, switch_points: Sequence[SwitchPoint], selected: Collection[int], feeds: Sequence[Feeds]
) -> Iterator[tuple[int, float, int]]:
    """For each of the choices `selected` its position, its error, and how many runs there were since the one before."""
    remaining = set(selected)
    with_switch = [index for index in find_switchable(quantized_model, switch_points) if index in remaining]
    for start in range(0, len(with_switch), SWITCHES_PER_SESSION):
        group = with_switch[start : start + SWITCHES_PER_SESSION]
        variant = insert_switches(quantized_model, switch_points, by_input=group)
        session = _SwitchSession(variant.model, feeds, variant.feed())
        for index in group:
            error = session.relative_error(session, variant.feed({index}))
            yield index, error, session.take_run_count()
    reference: _SwitchSession | None = None
    for index in sorted(remaining - set(with_switch)):
        reference_runs = 0
        if reference is None:
            reference = _SwitchSession(insert_switches(quantized_model, switch_points, by_input=()).model, feeds, {})
            reference_runs = reference.take_run_count()
        isolated = _SwitchSession(
            insert_switches(quantized_model, switch_points, by_input=(), on={index}).model, feeds, None
        )
        error = isolated.relative_error(reference, {})
        yield index, error, reference_runs + isolated.take_run_count()


def _find_switch_points(quantized_model: Model, sites: ComparedSites) -> tuple[list[OpKey], list[SwitchPoint]]:
    """The quantizations whose float tensor is known, with their places."""
    op_keys, switch_points = [], []
    for site in sites.sites:
        float_tensor = site.input_tensor if site.input_tensor is not None else site.read_float_weight
        if (
            site.input_tensor is not None
            and quantized_model.output(site.input_tensor).shape != quantized_model.output(site.output_tensor).shape
        ):
            float_tensor = site.quantization_op.tensor  # a weight that is quantized in another view
        if float_tensor is not None:
            op_keys.append((site.quantization_op.graph, site.quantization_op.op))
            switch_points.append(SwitchPoint(quantized=site.output_tensor, float_source=float_tensor))
    return op_keys, switch_points


def _chunk_sample_feeds(batches: Dataset, inputs: Mapping[str, str], *, batch_independent: bool) -> Iterator[Feeds]:
    """A few samples, spread over the data, joined where they can be."""
    max_samples = MAX_BATCHES * BATCH_SIZE if batch_independent else MAX_SAMPLES
    count = min(batches.count, max_samples)
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


def _count_rows(feed: Feeds) -> int:
    return next((len(value) for value in feed.values() if value.ndim), 1)


class _SwitchSession:
    """A model in a session, with the samples that it is run on."""

    def __init__(self, model: Model, feeds: Sequence[Feeds], reference_switches: Feeds | None) -> None:
        """`reference_switches` are the inputs with which it is the reference; None if it is none."""
        self._runner = formats.format_module(model.format).create_runner(model)
        self._feeds = feeds
        self._runs = 0
        self.references = [] if reference_switches is None else [self.run(feed, reference_switches) for feed in feeds]

    def run(self, feed: Feeds, switches: Feeds) -> dict[str, Array]:
        """The outputs."""
        self._runs += 1
        return self._runner.run({**feed, **switches})

    def take_run_count(self) -> int:
        """How many runs there were since this was last asked."""
        runs, self._runs = self._runs, 0
        return runs

    def relative_error(self, reference: _SwitchSession, switches: Feeds) -> float:
        """The largest error of an output over all samples, as a share of it."""
        power: dict[str, float] = {}
        error: dict[str, float] = {}
        for feed, expected in zip(self._feeds, reference.references, strict=True):
            actual = self.run(feed, switches)
            for name, value in expected.items():
                output_power, output_error = _power_and_error(value, actual.get(name))
                power[name] = power.get(name, 0.0) + output_power
                error[name] = error.get(name, 0.0) + output_error
        float_names = [name for name in power if reference.references[0][name].dtype.kind == "f"]
        shares = [
            error[name] / power[name] if power[name] else (math.inf if error[name] else 0.0) for name in float_names
        ]
        return max(shares, default=math.nan)


def _power_and_error(expected: Array, actual: Array | None) -> tuple[float, float]:
    """Sum of squares of an output and of its differences; what has another shape is wholly wrong."""
    if expected.dtype.kind != "f":
        return 0.0, 0.0
    flat = expected.astype(np.float64).reshape(-1)
    power = float(flat @ flat)
    if actual is None or actual.shape != expected.shape:
        return power, power
    with np.errstate(invalid="ignore", over="ignore"):
        difference = actual.astype(np.float64).reshape(-1) - flat
        return power, float(difference @ difference)
