"""The inputs and outputs that two models share, and the tensors that are compared where outputs are not comparable.

A softmax turns a small error of a few scores into a large one of probabilities. An op that selects rows, as the
non-maximum suppression of a detector, returns other rows, in another order or number, if a score changes a little. An
output that is a sequence or a map is no tensor; those that it is made of are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from graphquant.analysis.comparison import ErrorSums, ignore_overflow
from graphquant.calibration.memory import return_freed_memory
from graphquant.errors import UsageError, did_you_mean
from graphquant.formats import create_runner, format_module
from graphquant.ir import (
    CONTROL_EDGE,
    FLOAT_TYPES,
    MAC_KINDS,
    QUANTIZATION_KINDS,
    RESHAPING_KINDS,
    Graph,
    Model,
    Op,
    TensorRef,
    Use,
    fixed_cache_size,
    follow_to_end,
    reachable,
)

if TYPE_CHECKING:
    from graphquant.formats import Feeds, InputSpec, Runner
    from graphquant.numerics import Array

# A few uncertain samples cause most of the error behind them. The class stays, so the error of the scores counts.
CLASSIFIER_KINDS = frozenset({"softmax", "log_softmax"})
MAX_LABEL_RANK = 2  # number of axes of labels of whole samples, which a sigmoid decides; masks and maps have more
COPY_KINDS = RESHAPING_KINDS | QUANTIZATION_KINDS | {"identity"}  # kinds between a softmax and an output, for example

SELECTING_TYPES = frozenset(
    {
        *("NonMaxSuppression", "NonZero", "TopK", "Compress", "Unique"),  # ONNX
        *(f"NonMaxSuppression{suffix}" for suffix in ("V2", "V3", "V4", "V5", "WithOverlaps")),
        *("CombinedNonMaxSuppression", "TopKV2", "Where", "UniqueV2"),  # TensorFlow
    }
)
"""Op types that select rows by their values."""
PACKING_TYPES = frozenset({"ZipMap", "SplitToSequence", "SequenceConstruct", "SequenceInsert", "Optional"})
"""Op types whose output is no tensor."""


def _main_input(model: Model, tensor: TensorRef) -> TensorRef | None:
    return model.graphs[tensor.graph].source_of(Use(tensor.graph, tensor.op, model.op(tensor).main_slot))


def _original(model: Model, tensor: TensorRef) -> TensorRef:
    """Return the tensor whose values `tensor` has behind reshapes, copies and Q/DQ pairs."""
    return follow_to_end(tensor, lambda copy: _main_input(model, copy) if model.op(copy).kind in COPY_KINDS else None)


def match_inputs(first: Sequence[InputSpec], second: Sequence[InputSpec]) -> dict[str, str]:
    """Match each input of the other model with an input of the first by name, or else in order."""
    name_by_alias = {name: spec.name for spec in reversed(first) for name in (*spec.aliases, spec.name)}
    name_by_alias.update((spec.name, spec.name) for spec in first)
    matches = {
        spec.name: next(name_by_alias[name] for name in (spec.name, *spec.aliases) if name in name_by_alias)
        for spec in second
        if not name_by_alias.keys().isdisjoint((spec.name, *spec.aliases))
    }
    if len(matches) == len(second) and len(set(matches.values())) == len(first):
        return matches
    if len(first) != len(second):
        raise UsageError(
            f"The models take different inputs: {_quote_names([spec.name for spec in first])}, and"
            f" {_quote_names([spec.name for spec in second])}. Compare models that take the same."
        )
    return {second_spec.name: first_spec.name for first_spec, second_spec in zip(first, second, strict=True)}


def match_outputs(first: Sequence[str], second: Sequence[str], explicit: Mapping[str, str]) -> dict[str, str]:
    """Match each output of the first model with one of the other: as given, by name, and the rest in order."""
    for names, requested, ordinal in ((first, explicit.keys(), "first"), (second, explicit.values(), "second")):
        for name in requested:
            if name not in names:
                raise UsageError(
                    f"The {ordinal} model has no output {name!r}. Its outputs are {_quote_names(names)}."
                    f"{did_you_mean(name, names)}"
                )
    if explicit:
        return dict(explicit)
    matches = {name: name for name in first if name in set(second)}
    unmatched_first, unmatched_second = ([name for name in names if name not in matches] for names in (first, second))
    if len(unmatched_first) != len(unmatched_second):
        raise UsageError(
            f"The models have different outputs: {_quote_names(unmatched_first) or 'none'} of the first and"
            f" {_quote_names(unmatched_second) or 'none'} of the second have no match. Pair them with --match"
            " NAME=OTHER."
        )
    matches.update(zip(unmatched_first, unmatched_second, strict=True))
    return {name: matches[name] for name in first}


def _quote_names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def find_scores(runner: Runner) -> dict[str, Use]:
    """Find the scores from which a softmax or a sigmoid makes an output, by name of the output."""
    results = {name: _original(runner.model, tensor) for name, tensor in runner.output_tensors.items()}
    ops = {name: runner.model.op(result) for name, result in results.items()}
    return {
        name: Use(results[name].graph, op.name, op.main_slot)
        for name, op in ops.items()
        if op.kind in CLASSIFIER_KINDS | {"sigmoid"}
    }


def read_scores(runner: Runner, output: str, feeds: Iterable[Feeds]) -> list[Array]:
    """Return the scores of all runs from which a softmax, or a sigmoid for whole samples, makes `output`, if any."""
    use = find_scores(runner).get(output)
    scores = runner.model.graphs[use.graph].source_of(use) if use else None
    if use is None or scores is None or runner.unobservable([scores, tensor := runner.output_tensors[output]]):
        return []
    values: list[Array] = []
    for run in runner.observe([scores, tensor], feeds):
        if not has_label_scores(runner.model, use, run[tensor]):
            return []  # at once, because the maps of all runs may need much memory
        values += run[scores]
    return values


def has_label_scores(model: Model, use: Use, outputs: Iterable[Array]) -> bool:
    """Return True if `use` reads scores of labels: those of a softmax, or of a sigmoid for whole samples."""
    is_classifier = model.graphs[use.graph].op(use.op).kind in CLASSIFIER_KINDS
    return is_classifier or all(value.ndim <= MAX_LABEL_RANK for value in outputs)


def scores_sqnr(expected: Sequence[Array], actual: Sequence[Array]) -> float:
    """Return the SQNR in dB of scores; minus infinity if there are none, or their shapes differ."""
    total = ErrorSums()
    with ignore_overflow():
        for pair in zip(expected, actual, strict=False):
            total.add(*pair)
    return total.sqnr if total.count and not total.problem else -math.inf


class Selection(NamedTuple):
    """A use of a tensor that is compared in place of outputs; `is_ranking` if its largest values are the result."""

    use: Use
    is_ranking: bool


class SelectionRunner:
    """A runner that also returns the tensors from which ops select the rows of outputs, by a name for reports."""

    def __init__(self, runner: Runner, selections: Mapping[str, Selection], replaced: frozenset[str]) -> None:
        """Return the tensors of `selections`, which are compared in place of the outputs `replaced`."""
        self.runner, self.selections, self.replaced = runner, selections, replaced
        graphs = runner.model.graphs
        sources = {name: graphs[use.graph].source_of(use) for name, (use, _) in selections.items()}
        self.tensors = {name: tensor for name, tensor in sources.items() if tensor is not None}
        # A runner of TensorFlow observes only one set of tensors of functions at a time.
        in_main = not any(tensor.graph for tensor in self.tensors.values())
        self._observer = runner if in_main else format_module(runner.model.format).create_runner(runner.model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run one feed."""
        return next(self.run_each([feeds]))

    def run_each(self, feeds: Iterable[Feeds]) -> Iterator[dict[str, Array]]:
        """Yield the outputs and tensors of each feed."""
        named = {**self.runner.output_tensors, **self.tensors}
        for values in self._observer.observe(list(dict.fromkeys(named.values())), feeds):
            yield {name: values[tensor][-1] for name, tensor in named.items() if values[tensor]}


def with_selections(runner: Runner, reference: Runner | None = None) -> Runner:
    """Return a runner that also returns the tensors before selections, if possible; those of `reference` if given.

    A quantized model has the float model as its reference, whose ops it has with their names.
    """
    if isinstance(reference, SelectionRunner):
        selections, replaced = reference.selections, reference.replaced
    else:
        selections, replaced = find_selections(runner) if reference is None else ({}, frozenset())
    has_ops = all(use.op in runner.model.graphs.get(use.graph, ()) for use, _ in selections.values())
    if not selections or not has_ops or runner.start_sequence():
        return runner
    return _wrap_observable(runner, selections, replaced)


def with_scores(runner: Runner, scores: Mapping[str, Use]) -> tuple[Runner, dict[str, str]]:
    """Return a runner that also returns `scores`, if possible, and the names of these by name of the output."""
    selections, replaced, plain = dict[str, Selection](), frozenset[str](), runner
    if isinstance(runner, SelectionRunner):
        selections, replaced, plain = dict(runner.selections), runner.replaced, runner.runner
    names = {output: f"scores of {output}" for output in scores if output not in replaced}
    if not names or plain.start_sequence():
        return runner, {}
    selections |= {name: Selection(scores[output], is_ranking=True) for output, name in names.items()}
    wrapped = _wrap_observable(plain, selections, replaced)
    return (runner, {}) if wrapped is plain else (wrapped, names)


def _wrap_observable(runner: Runner, selections: Mapping[str, Selection], replaced: frozenset[str]) -> Runner:
    """Return a runner that also returns `selections`, or `runner` if not all of them can be observed."""
    wrapped = SelectionRunner(runner, selections, replaced)
    is_complete = len(wrapped.tensors) == len(selections) and runner.output_tensors.keys() == set(runner.outputs)
    return runner if not is_complete or runner.unobservable([*wrapped.tensors.values()]) else cast("Runner", wrapped)


def compared_outputs(first: Runner, second: Runner, outputs: Mapping[str, str]) -> dict[str, str]:
    """Match what is compared of two models: their matched `outputs`, or the tensors before the selections of these."""
    outputs = {name: other for name, other in outputs.items() if not _has_unwritten_values(first, name)}
    if not isinstance(first, SelectionRunner) or not isinstance(second, SelectionRunner):
        return outputs
    kept = {name: other for name, other in outputs.items() if name not in first.replaced}
    return kept | {name: name for name in first.tensors}


def _has_unwritten_values(runner: Runner, output: str) -> bool:
    """Return True if an output is a cache of the last positions: onnxruntime writes no values for missing positions."""
    tensor = runner.output_tensors.get(output)
    return tensor is not None and tensor.port > 0 and fixed_cache_size(runner.model.op(tensor)) > 0


def has_classes(runner: Runner, name: str) -> bool:
    """Return False if a compared tensor holds no class scores.

    That is so if an op selects boxes from it, or if the size of its only axis is unknown: samples or steps of time.
    """
    selection = runner.selections.get(name) if isinstance(runner, SelectionRunner) else None
    tensor = runner.output_tensors.get(name)
    is_series = tensor is not None and runner.model.output(tensor).shape == (None,)
    return not is_series and (selection is None or selection.is_ranking)


def find_selections(runner: Runner) -> tuple[Mapping[str, Selection], frozenset[str]]:
    """Find the float tensors from which ops select rows of outputs, and the names of these outputs.

    Only selections by values that quantization may change count. Ops with multiply-adds that follow, as in the second
    stage of a detector, are not measured then, so that an output is omitted if most of these ops follow, or if it has
    the same number of rows for all samples.
    """
    model = runner.model
    found, replaced = _find_packed_tensors(model, {*runner.output_tensors.values()}), set[str]()
    if not any(_selecting_ops(model, graph) for graph in model.graphs.values()):
        return dict(found.values()), frozenset()

    def inner_tensor(tensor: TensorRef) -> TensorRef | None:
        op = model.op(tensor)
        if op.kind == "call" and len(op.calls) == 1:
            body = model.graphs[op.calls[0].graph]
            return body.source_of(Use(body.name, body.outputs[tensor.port], 0))
        return model.graphs[tensor.graph].source_of(Use(tensor.graph, op.name, 0)) if op.kind == "identity" else None

    graphs = dict[str, _GraphSelections]()
    for label, output in runner.output_tensors.items():
        tensor = follow_to_end(output, inner_tensor)
        if tensor.graph not in graphs:
            graphs[tensor.graph] = _GraphSelections(model, model.graphs[tensor.graph])
        selections = graphs[tensor.graph].before(tensor)
        found.update(selections)
        replaced |= {label} if selections else set()
    return dict(found.values()), frozenset(replaced)


def _find_packed_tensors(model: Model, outputs: Container[TensorRef]) -> dict[TensorRef, tuple[str, Selection]]:
    """Find the float tensors in outputs that are no tensors, without `outputs`, with a name for reports."""
    graph, found = model.main, dict[TensorRef, tuple[str, Selection]]()

    def packing_ops(name: str) -> Iterable[str]:
        return [source for source in graph.predecessors(name) if graph.op(source).type in PACKING_TYPES]

    for name in reachable([name for output in graph.outputs for name in packing_ops(output)], packing_ops):
        op_type = graph.op(name).type
        for slot, tensor in enumerate(graph.slots(name)):
            is_float = tensor is not None and model.output(tensor).dtype in FLOAT_TYPES
            if tensor and is_float and tensor not in outputs and model.op(tensor).type not in PACKING_TYPES:
                selection = Selection(Use(graph.name, name, slot), is_ranking=op_type == "ZipMap")
                found[tensor] = f"{tensor} before {op_type}", selection
    return found


class _GraphSelections:
    """Selections in a graph of a model."""

    def __init__(self, model: Model, graph: Graph) -> None:
        self._model, self._graph = model, graph
        self._selecting = _selecting_ops(model, graph)
        self._multiplying = {op.name for op in graph.ops() if _runs(model, op, lambda inner: inner.kind in MAC_KINDS)}
        self._computed = _ops_behind(graph, self._multiplying - self._selecting)
        self._selected = {*reachable(self._selecting & self._computed, graph.successors)}

    def before(self, output: TensorRef) -> dict[TensorRef, tuple[str, Selection]]:
        """Return the selections that make `output`, with a name for reports, by tensor."""
        graph, region = self._graph, list[str]()
        if output.op in self._selected:
            region = reachable([output.op], lambda name: [p for p in graph.predecessors(name) if p in self._selected])
        reasons = {graph.op(name).type: graph.op(name).kind for name in region if name in self._selecting}
        following, is_ranking = len(self._multiplying.intersection(region)), {*reasons.values()} == {"top_k"}
        is_label = {*reasons.values()} == {"arg_max"} and self._model.output(output).dtype not in FLOAT_TYPES
        if 2 * following > len(self._multiplying) or (following and is_ranking) or is_label:
            return {}
        found = dict[TensorRef, tuple[str, Selection]]()
        for name in region:
            for source, edges in graph.predecessors(name).items():
                for key, edge in edges.items() if source in self._computed and source not in self._selected else ():
                    if key != CONTROL_EDGE and graph.op(source).outputs[edge["port"]].dtype in FLOAT_TYPES:
                        use = Use(graph.name, name, key) if isinstance(key, int) else key[1]
                        selection = Selection(follow_to_end(use, self._unmoved_use), is_ranking)
                        tensor = self._model.graphs[selection.use.graph].source_of(selection.use)
                        note = " (later ops not measured)" if following else ""
                        found[tensor or output] = f"{tensor} before {next(iter(reasons))}{note}", selection
        return found

    def _unmoved_use(self, use: Use) -> Use | None:
        """Return the use before the op that makes the tensor at `use`, if that only moves values."""
        tensor = self._model.graphs[use.graph].source_of(use)
        op = None if tensor is None or tensor.graph != self._graph.name else self._graph.op(tensor.op)
        return None if op is None or op.kind not in RESHAPING_KINDS else Use(self._graph.name, op.name, op.main_slot)


def _selects(op: Op) -> bool:
    return op.type in SELECTING_TYPES and op.kind != "where"  # ONNX's Where has the rows of its inputs


def _selecting_ops(model: Model, graph: Graph) -> set[str]:
    """Return the ops that select by their values, or that compute indices of rows from them."""
    selecting = {op.name for op in graph.ops() if _runs(model, op, _selects)}
    selecting.update(chain.from_iterable(_peak_ops(model, graph, op) for op in graph.ops()))
    largest = {op.name for op in graph.ops() if op.kind == "arg_max"}
    return selecting | {name for name in largest if _reaches_indices(graph, name)}


def _ops_behind(graph: Graph, names: Iterable[str]) -> set[str]:
    """Return the ops `names` and those that depend on their values, not only on shapes."""
    return {*reachable(names, lambda name: () if graph.op(name).kind == "shape" else graph.successors(name))}


def _reaches_indices(graph: Graph, name: str) -> bool:
    """Return True if the values of an op become indices of another, and not only a label."""
    reached = _ops_behind(graph, [name])
    slots = ((op, slot, tensor) for op in map(graph.op, reached) for slot, tensor in enumerate(graph.slots(op.name)))
    return any(tensor is not None and tensor.op in reached and op.role(slot) == "indices" for op, slot, tensor in slots)


def _peak_ops(model: Model, graph: Graph, op: Op) -> list[str]:
    """Return the op and the max pool if it selects peaks, by comparing values with their maximum over a window."""
    if not op.outputs or op.outputs[0].dtype != "bool":
        return []
    operands = {_original(model, tensor) for tensor in graph.slots(op.name) if tensor is not None}
    pooled = {tensor: _main_input(model, tensor) for tensor in operands if model.op(tensor).kind == "max_pool"}
    pools = [tensor.op for tensor, source in pooled.items() if source and _original(model, source) in operands]
    return [op.name, *pools] if pools else []


def _runs(model: Model, op: Op, condition: Callable[[Op], bool]) -> bool:
    """Return True if the condition holds for `op`, or for an op of the graphs that it runs."""
    graphs = model.graphs_reachable_from(call.graph for call in op.calls) if op.calls else ()
    return condition(op) or any(condition(inner) for name in graphs for inner in model.graphs[name].ops())


MAX_KEPT_BYTES = 1 << 27  # maximum bytes of all samples of a meter and their float outputs
MIN_KEPT_SAMPLES = 4  # minimum number of samples, whatever the outputs take


class OutputMeter:
    """Measures the worst output of quantized models on a few samples. The float model runs only once."""

    def __init__(self, source: Model, samples: Iterable[Feeds], target_sqnr: float) -> None:
        """Run the float model on the samples, fewer if the outputs are large."""
        self._target_sqnr = target_sqnr
        runner = create_runner(source)
        runner.start_sequence()  # it is shared, and a model with state has that of other samples
        self._runner, feeds = with_selections(runner), list(samples)
        self.compares_selections = isinstance(self._runner, SelectionRunner) and bool(self._runner.replaced)
        self._expected = [self._runner.run(feeds[0])]
        size = sum(value.nbytes for value in (*feeds[0].values(), *self._expected[0].values()))
        self.feeds = feeds[: max(MAX_KEPT_BYTES // max(size, 1), MIN_KEPT_SAMPLES)]
        self._expected += [self._runner.run(feed) for feed in self.feeds[1:]]
        self._runner.free_session()
        return_freed_memory()
        self._scores: dict[str, list[Array]] = {}
        # Squared errors of samples by output, the worst output first, of the model that was measured last.
        self.sample_errors: dict[str, list[float]] = {}
        self.feeds_by_error = self.feeds  # once a model was measured, the half with its largest errors comes first

    def worst_sqnr(self, quantized: Model) -> float:
        """Measure the SQNR in dB of the worst float output; of its scores behind a softmax, if those are better."""
        runner = with_selections(format_module(quantized.format).create_runner(quantized), self._runner)
        inputs = match_inputs(self._runner.inputs, runner.inputs)
        names = compared_outputs(self._runner, runner, match_outputs(self._runner.outputs, runner.outputs, {}))
        feeds = [{name: feed[source_name] for name, source_name in inputs.items()} for feed in self.feeds]
        sums = {name: ErrorSums() for name in names}
        errors = {name: [0.0] * len(feeds) for name in names}
        with ignore_overflow():
            for number, (outputs, expected) in enumerate(zip(runner.run_each(feeds), self._expected, strict=True)):
                for name, quantized_name in names.items():
                    value = expected.get(name)
                    if value is not None and value.dtype.name in FLOAT_TYPES and quantized_name in outputs:
                        before = sums[name].error
                        sums[name].add(value, outputs[quantized_name])
                        errors[name][number] = sums[name].error - before
        sqnr = {name: total.sqnr for name, total in sums.items() if total.count and not total.problem}
        self.sample_errors = {name: errors[name] for name in sorted(sqnr, key=lambda name: sqnr[name])}
        if self.feeds_by_error is self.feeds and sqnr:
            worst = next(iter(self.sample_errors.values()))
            order = sorted(range(len(worst)), key=lambda number: -worst[number])
            pairs = zip(order, order[len(order) // 4 :], strict=False)  # one of the largest errors, and one of the next
            self.feeds_by_error = [self.feeds[number] for number in dict.fromkeys([*chain(*pairs), *order])]
        for name in [name for name, value in sqnr.items() if value < self._target_sqnr]:
            if name not in self._scores:
                self._scores[name] = read_scores(self._runner, name, self.feeds)
            if self._scores[name]:
                actual = read_scores(runner, names[name], feeds)
                sqnr[name] = max(sqnr[name], scores_sqnr(self._scores[name], actual))
        return min(sqnr.values(), default=math.inf)
