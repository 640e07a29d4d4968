"""The inputs and outputs that two models share, and the tensors that are compared where outputs are not comparable.

A softmax turns a small error of a few scores into a large one of probabilities. An op that selects rows, as the
non-maximum suppression of a detector, returns other rows, in another order or number, if a score changes a little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import (
    FLOAT_TYPES,
    MAC_KINDS,
    QUANTIZATION_KINDS,
    RESHAPING_KINDS,
    Model,
    Op,
    TensorRef,
    Use,
    follow,
    follow_to_end,
    reachable,
)

if TYPE_CHECKING:
    from graphquant.formats import Feeds, InputSpec, Runner
    from graphquant.numerics import Array

CLASSIFIER_KINDS = frozenset({"softmax", "log_softmax"})
"""Kinds that turn scores into probabilities. A few uncertain samples cause most of the error behind them, although the
class stays, so that without a bound the error of the scores counts."""
PROBABILITY_PATH_KINDS = RESHAPING_KINDS | QUANTIZATION_KINDS | {"identity"}  # kinds between a softmax and an output

SELECTING_TYPES = frozenset(
    {
        *("NonMaxSuppression", "NonZero", "TopK", "Compress", "Unique"),  # ONNX
        *(f"NonMaxSuppression{suffix}" for suffix in ("V2", "V3", "V4", "V5", "WithOverlaps")),
        *("CombinedNonMaxSuppression", "TopKV2", "Where", "UniqueV2"),  # TensorFlow
    }
)
"""Op types that select rows by their values."""


def find_scores(model: Model, output: TensorRef | None) -> TensorRef | None:
    """Find the input of the softmax that makes `output`, through reshapes, copies and Q/DQ pairs."""

    def source(tensor: TensorRef) -> TensorRef | None:
        op = model.op(tensor)
        if op.kind not in PROBABILITY_PATH_KINDS:
            return None
        return model.graphs[tensor.graph].source_of(Use(tensor.graph, op.name, op.main_slot))

    for tensor in () if output is None else follow(output, source):
        op = model.op(tensor)
        if op.kind in CLASSIFIER_KINDS:
            return model.graphs[tensor.graph].source_of(Use(tensor.graph, op.name, op.main_slot))
    return None


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


class SelectionRunner:
    """A runner that also returns the tensors from which ops select the rows of outputs, by a name for reports."""

    def __init__(self, runner: Runner, uses: Mapping[str, Use], replaced: frozenset[str]) -> None:
        """Return the tensors read at `uses`, which are compared in place of the outputs `replaced`."""
        self._runner, self.uses, self.replaced = runner, uses, replaced
        self.tensors = {name: tensor for name, use in uses.items() if (tensor := runner.model.main.source_of(use))}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run one feed."""
        return next(self.run_each([feeds]))

    def run_each(self, feeds: Iterable[Feeds]) -> Iterator[dict[str, Array]]:
        """Yield the outputs and tensors of each feed."""
        named = {**self._runner.output_tensors, **self.tensors}
        for values in self._runner.observe(list(dict.fromkeys(named.values())), feeds):
            yield {name: values[tensor][-1] for name, tensor in named.items() if values[tensor]}


def with_selections(runner: Runner, reference: Runner | None = None) -> Runner:
    """Return a runner that also returns the tensors before selections, if possible; those of `reference` if given.

    A quantized model has the float model as its reference, whose ops it has with their names.
    """
    if isinstance(reference, SelectionRunner):
        uses, replaced = reference.uses, reference.replaced
    else:
        uses, replaced = find_selections(runner) if reference is None else ({}, frozenset())
    if not uses or any(use.op not in runner.model.main for use in uses.values()) or runner.start_sequence():
        return runner
    selections = SelectionRunner(runner, uses, replaced)
    is_complete = len(selections.tensors) == len(uses) and runner.output_tensors.keys() == set(runner.outputs)
    return (
        runner if not is_complete or runner.unobservable([*selections.tensors.values()]) else cast("Runner", selections)
    )


def compared_outputs(first: Runner, second: Runner, outputs: Mapping[str, str]) -> dict[str, str]:
    """Match what is compared of two models: their matched `outputs`, or the tensors before the selections of these."""
    if not isinstance(first, SelectionRunner) or not isinstance(second, SelectionRunner):
        return dict(outputs)
    kept = {name: other for name, other in outputs.items() if name not in first.replaced}
    return kept | {name: name for name in first.tensors}


def find_selections(runner: Runner) -> tuple[Mapping[str, Use], frozenset[str]]:
    """Find the float tensors from which ops select rows of outputs, as one reader of each, and names of these outputs.

    An output is omitted if no op selects its rows by values that depend on an input, or if an op with multiply-adds
    follows the selection, whose error would not be measured.
    """
    model, graph = runner.model, runner.model.main
    selecting = [op.name for op in graph.ops() if _runs(model, op, _selects)]
    if not selecting:
        return {}, frozenset()

    def readers_of_values(name: str) -> Iterable[str]:
        return () if graph.op(name).kind == "shape" else graph.successors(name)

    computed = {*reachable(graph.inputs, readers_of_values)}
    selected = {*reachable([name for name in selecting if name in computed], graph.successors)}
    unselected = computed - selected

    def selected_sources(name: str) -> Iterable[str]:
        return [source for source in graph.predecessors(name) if source in selected]

    def unmoved_use(use: Use) -> Use | None:
        tensor = graph.source_of(use)
        op = None if tensor is None or tensor.graph else graph.op(tensor.op)
        return None if op is None or op.kind not in RESHAPING_KINDS else Use("", op.name, op.main_slot)

    uses, replaced = dict[TensorRef | None, tuple[str, Use]](), set[str]()
    for label, output in runner.output_tensors.items():
        region = [] if output.graph or output.op not in selected else reachable([output.op], selected_sources)
        if any(_runs(model, graph.op(name), _multiplies) for name in region):
            continue
        sources = [
            follow_to_end(Use("", name, slot), unmoved_use)
            for name in region
            for slot, tensor in enumerate(graph.slots(name))
            if tensor is not None and tensor.op in unselected and model.output(tensor).dtype in FLOAT_TYPES
        ]
        if sources:
            reason = next(graph.op(name).type for name in region if name in selecting)
            uses.update((graph.source_of(use), (f"{graph.source_of(use)} before {reason}", use)) for use in sources)
            replaced.add(label)
    return dict(uses.values()), frozenset(replaced)


def _selects(op: Op) -> bool:
    return op.type in SELECTING_TYPES and op.kind != "where"  # ONNX's Where has the rows of its inputs


def _multiplies(op: Op) -> bool:
    return op.kind in MAC_KINDS


def _runs(model: Model, op: Op, condition: Callable[[Op], bool]) -> bool:
    """Return True if the condition holds for `op`, or for an op of the graphs that it runs."""
    graphs = model.graphs_reachable_from(call.graph for call in op.calls) if op.calls else ()
    return condition(op) or any(condition(inner) for name in graphs for inner in model.graphs[name].ops())
