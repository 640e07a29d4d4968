"""TensorFlow 1's `contrib.graph_editor` for graphquant's models, TensorFlow and ONNX, nested graphs included.

from graphquant import graph_editor as ge

model = gq.load("model.pb")
ge.insert_quant_op(model, "conv1/Relu:0", "conv2", ge.FixedPoint(bits=8, exponent=-4))
model.save("model.quant.pb")

`Operation` and `Tensor` are references that stay valid while the graph is edited; two with the same name are equal.
Three things are stricter than in TensorFlow 1. Each input slot is rerouted individually, so that swapping the operands
of `Add(a, b)` gives `Add(b, a)`. No cycle is ever created. If an error is raised, nothing is changed.
docs/from-graph-editor.md shows how to port TF1 code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from graphquant import formats
from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import QUANTIZATION_KINDS, Graph, Model, Op, Shape, TensorRef, Use, reachable
from graphquant.numerics import IntType, QParams, qparams_from_scale
from graphquant.qdq import FAMILIES, FamilyRequest, QDQFamily, QDQSite, RoundingMode
from graphquant.qdq.family import ROUNDING_MODES
from graphquant.quantize.rewrite import FRAME_KINDS
from graphquant.utils.options import checks_types
from graphquant.utils.text import join_limited

__all__ = [
    "FixedPoint",
    "Operation",
    "Tensor",
    "get_consuming_ops",
    "get_generating_ops",
    "get_name_scope_ops",
    "get_tensor_by_name",
    "insert_quant_op",
    "make_quant_op",
    "reroute_ts",
    "select_ops",
    "select_ts",
    "swap_ts",
]

RULE_NAME = "insert_quant_op"  # stamped on each new op in place of a rule's name
QUANT_SCOPE = "SlimQuant"
MIN_BITS, MAX_BITS = 2, 16
MIN_EXPONENT = -126
MAX_LISTED_CONSUMERS = 5  # number of consumers that an error lists
_TENSORFLOW_SCOPE = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")


@dataclass(frozen=True, slots=True, repr=False)
class Operation:
    """One op of `graph`. Graph inputs, constants and outputs are ops too; an output's name starts with `@`."""

    graph: Graph
    name: str

    def __str__(self) -> str:
        return f"{self.graph.name}/{self.name}" if self.graph.name else self.name

    def __repr__(self) -> str:
        return f"<Operation {str(self)!r}>"

    @property
    def node(self) -> Op:
        """The op in the model, with attributes, roles and value."""
        if self.name not in self.graph:
            raise UsageError(f"Op {self} no longer exists. Select it again after removing ops.")
        return self.graph.op(self.name)

    @property
    def type(self) -> str:
        """The framework's own op type, "Conv2D"."""
        return self.node.type

    @property
    def kind(self) -> str:
        """The kind shared by both frameworks, "conv"."""
        return self.node.kind

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors in its connected input slots, in order."""
        self.node  # noqa: B018  # raises if the op was removed
        filled = [slot for slot in self.graph.slots(self.name) if slot is not None]
        return [Tensor(self.graph.graphs[slot.graph], slot) for slot in filled]

    @property
    def outputs(self) -> list[Tensor]:
        """Its output tensors."""
        ports = range(len(self.node.outputs))
        return [Tensor(self.graph, TensorRef(self.graph.name, self.name, port)) for port in ports]


@dataclass(frozen=True, slots=True, repr=False)
class Tensor:
    """One output of an op of `graph`."""

    graph: Graph
    ref: TensorRef

    def __str__(self) -> str:
        return str(self.ref)

    def __repr__(self) -> str:
        return f"<Tensor {str(self)!r}>"

    @property
    def name(self) -> str:
        """`op:port`, without the graph."""
        return f"{self.ref.op}:{self.ref.port}"

    @property
    def op(self) -> Operation:
        """The op that produces it."""
        return Operation(self.graph, self.ref.op)

    @property
    def dtype(self) -> str | None:
        """Numpy-like name, None if it is unknown before a run."""
        return self.op.node.outputs[self.ref.port].dtype

    @property
    def shape(self) -> Shape | None:
        """Static sizes: None for an unknown size, None instead of all if the rank is unknown."""
        return self.op.node.outputs[self.ref.port].shape

    def uses(self) -> list[Use]:
        """Return every input slot that reads the tensor, also in bodies of its readers."""
        self.op.node  # noqa: B018  # raises if the op was removed
        return self.graph.consumers(self.ref)

    def consumers(self) -> list[Operation]:
        """Return the ops that read the tensor, each once."""
        return list(dict.fromkeys(Operation(self.graph.graphs[use.graph], use.op) for use in self.uses()))


T = TypeVar("T", Operation, Tensor)


def searched_graphs(graph: Graph | Model) -> list[Graph]:
    """Return the graph itself, or a model's main graph and all graphs reachable from it."""
    if isinstance(graph, Model):
        return [graph.graphs[name] for name in graph.reachable_graphs()]
    if isinstance(graph, Graph):
        return [graph]
    message = f"A model or one of its graphs is required, but this is a {type(graph).__name__}."
    raise UsageError(f"{message} Use graphquant.load.")


def all_operations(graph: Graph | Model) -> Iterator[Operation]:
    """Yield all ops, in the order of the model."""
    return (Operation(owner, op.name) for owner in searched_graphs(graph) for op in owner.ops())


def all_tensors(graph: Graph | Model) -> Iterator[Tensor]:
    """Yield all outputs of all ops, in the order of the model."""
    return (tensor for op in all_operations(graph) for tensor in op.outputs)


@checks_types
def as_operations(selection: object, *, ignore_ts: bool = False) -> list[Operation]:
    """Return the ops of a selection: one op, an iterable of ops, a graph or a model. `ignore_ts` allows tensors."""
    if isinstance(selection, Graph | Model):
        return list(all_operations(selection))
    return _members(selection, Operation, ignored=Tensor if ignore_ts else Operation)


@checks_types
def as_tensors(selection: object, *, ignore_ops: bool = False) -> list[Tensor]:
    """Return the tensors of a selection: one tensor, an iterable of tensors, a graph or a model."""
    if isinstance(selection, Graph | Model):
        return list(all_tensors(selection))
    return _members(selection, Tensor, ignored=Operation if ignore_ops else Tensor)


def _members(selection: object, member_type: type[T], *, ignored: type) -> list[T]:
    members = list(selection) if isinstance(selection, Iterable) and not isinstance(selection, str) else [selection]
    for member in members:
        if not isinstance(member, member_type | ignored):
            noun, plural, function = ("a tensor", "tensors", "select_ts")
            if member_type is Operation:
                noun, plural, function = ("an op", "ops", "select_ops")
            message = f"The {type(member).__name__} {str(member)[:60]!r} is not {noun}."
            raise UsageError(f"{message} Select {plural} with graph_editor.{function}.")
    return [member for member in members if isinstance(member, member_type)]


@checks_types
def select_ops(
    *args: object, graph: Graph | Model | None = None, positive_filter: Callable[[Operation], bool] | None = None
) -> list[Operation]:
    r"""Return the ops that any of `args` selects, each once.

    Args:
        args: Regular expressions, searched anywhere in an op's name (`"^block1/"` matches that scope), or ops,
            iterables of ops, a graph. Tensors are ignored. A graph output matches only an expression that contains `@`,
            with which its name starts.
        graph: The graph to search, or a model with all graphs that run. An op of a nested graph matches by its own name
            and by `graph/op`.
        positive_filter: Predicate; only ops for which it is true are returned.

    Raises:
        UsageError: An expression is given without `graph`, it is not a regular expression, or an argument is not an op.
    """

    def search(pattern: re.Pattern[str], searched: Graph | Model) -> list[Operation]:
        ops = (op for op in all_operations(searched) if op.kind != "output" or "@" in pattern.pattern)
        return [op for op in ops if pattern.search(op.name) or pattern.search(str(op))]

    return _select(args, graph, positive_filter, search, partial(as_operations, ignore_ts=True))


@checks_types
def select_ts(
    *args: object, graph: Graph | Model | None = None, positive_filter: Callable[[Tensor], bool] | None = None
) -> list[Tensor]:
    r"""Return the tensors that any of `args` selects, each once.

    Args:
        args: Regular expressions, searched anywhere in a tensor's name (`r"^block1/.*:0$"`), or tensors, iterables of
            tensors, a graph. Ops are ignored.
        graph: The graph to search, or a model with all graphs that run. A tensor matches by `op:port`, by
            `graph/op:port`, and by its name in the file.
        positive_filter: Predicate; only tensors for which it is true are returned.

    Raises:
        UsageError: An expression is given without `graph`, is no regular expression, or an argument is no tensor.
    """

    def search(pattern: re.Pattern[str], searched: Graph | Model) -> list[Tensor]:
        return [tensor for tensor in all_tensors(searched) if any(map(pattern.search, _searchable_names(tensor)))]

    return _select(args, graph, positive_filter, search, partial(as_tensors, ignore_ops=True))


def _select(
    args: tuple[object, ...],
    graph: Graph | Model | None,
    positive_filter: Callable[[T], bool] | None,
    search: Callable[[re.Pattern[str], Graph | Model], list[T]],
    convert: Callable[[object], list[T]],
) -> list[T]:
    selected: dict[T, None] = {}
    for arg in args:
        if not isinstance(arg, str | re.Pattern):
            selected.update(dict.fromkeys(convert(arg)))
            continue
        if graph is None:
            raise UsageError("A regular expression needs a graph to search. Give graph=model.")
        try:
            pattern = re.compile(arg)
        except re.error as error:
            raise UsageError(f"{arg!r} is not a regular expression: {error}. Escape literal characters.") from error
        selected.update(dict.fromkeys(search(pattern, graph)))
    return [candidate for candidate in selected if positive_filter is None or positive_filter(candidate)]


@checks_types
def get_name_scope_ops(ops: object, scope: str) -> list[Operation]:
    """Return those of `ops` (ops, a graph or a model) that are named `scope` or are in that scope."""
    prefix = scope.rstrip("/")
    return [op for op in as_operations(ops) if op.name == prefix or op.name.startswith(f"{prefix}/")]


def get_generating_ops(ts: object) -> list[Operation]:
    """Return the producer of each tensor of `ts`, in that order."""
    return [tensor.op for tensor in as_tensors(ts)]


def get_consuming_ops(ts: object) -> list[Operation]:
    """Return the ops that read a tensor of `ts`, each once, graph outputs (`@name`) included."""
    return list(dict.fromkeys(op for tensor in as_tensors(ts) for op in tensor.consumers()))


@checks_types
def get_tensor_by_name(graph: Graph | Model, name: str) -> Tensor:
    """Return the tensor called `name`: its name in the file, `op:port`, `graph/op:port`, or `op` for port 0.

    Raises:
        UsageError: There is no such tensor, or there are several.
    """
    matches = find_tensors(graph, name)
    if len(matches) > 1:
        listed = ", ".join(repr(str(tensor)) for tensor in matches[:5])
        raise UsageError(f"{len(matches)} tensors are called {name!r}. Give the full name of one: {listed}.")
    return matches[0]


@checks_types
def find_tensors(graph: Graph | Model, name: str) -> list[Tensor]:
    """Return every tensor called `name` in the file, or else as `op:port`, or else as `op`; clones hold one each."""
    by_file, by_port, by_op = list[Tensor](), list[Tensor](), list[Tensor]()
    for owner in searched_graphs(graph):
        for op in owner.ops():
            ports = (port for port, output in enumerate(op.outputs) if output.name == name)
            by_file += [Tensor(owner, TensorRef(owner.name, op.name, port)) for port in ports]
        for label in dict.fromkeys((name, name.removeprefix(f"{owner.name}/"))):
            op_name, _, port_text = label.rpartition(":")
            outputs = owner.op(op_name).outputs if op_name in owner else ()
            ports = (port for port in range(len(outputs)) if str(port) == port_text)
            by_port += [Tensor(owner, TensorRef(owner.name, op_name, port)) for port in ports]
            if label in owner and owner.op(label).outputs:
                by_op.append(Tensor(owner, TensorRef(owner.name, label)))
    matches = by_file or by_port or by_op
    if not matches:
        candidates = dict.fromkeys(label for tensor in all_tensors(graph) for label in _searchable_names(tensor))
        suggestion = did_you_mean(name, candidates) or " graph_editor.select_ts('', graph=model) lists them all."
        raise UsageError(f"The model has no tensor {name!r}.{suggestion}")
    return matches


def _searchable_names(tensor: Tensor) -> tuple[str, ...]:
    return (tensor.name, str(tensor), tensor.op.node.outputs[tensor.ref.port].name)


@checks_types
def reroute_ts(ts0: object, ts1: object, can_modify: object = None, cannot_modify: object = None) -> int:
    """Reroute the readers of each tensor of `ts1` to the matching tensor of `ts0`.

    Readers that are ancestors of the tensor of `ts0` are not rerouted: a quantizer that was just added after a tensor
    still reads it. A graph output (`@name`) is a reader like any other. Pairs are processed in order, with the readers
    at the time of the call, so that a tensor may be in both lists.

    Args:
        ts0: A tensor or an iterable of tensors.
        ts1: As many tensors, each of the same dtype and a compatible shape.
        can_modify: Ops, or a graph; only these are rerouted.
        cannot_modify: Ops, or a graph; these are not rerouted.

    Returns:
        The number of rerouted inputs.

    Raises:
        UsageError: The lists differ in length, tensors differ in dtype or shape or belong to two models, or a reader
            cannot access its new tensor.
    """
    return _reroute_pairs(_matched_pairs(ts0, ts1), _modification_filter(can_modify, cannot_modify), swap=False)


@checks_types
def swap_ts(ts0: object, ts1: object, can_modify: object = None, cannot_modify: object = None) -> int:
    """Swap the readers of each pair of tensors, with the arguments and the result of `reroute_ts`.

    Raises:
        UsageError: As for `reroute_ts`; or an op to reroute lies between the two tensors of a pair, so that the swap
            would create a cycle.
    """
    return _reroute_pairs(_matched_pairs(ts0, ts1), _modification_filter(can_modify, cannot_modify), swap=True)


def _matched_pairs(ts0: object, ts1: object) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs of two lists, after checking that all of them match."""
    new_tensors, old_tensors = as_tensors(ts0), as_tensors(ts1)
    if len(new_tensors) != len(old_tensors):
        raise UsageError(f"{len(new_tensors)} tensors cannot be paired with {len(old_tensors)}. Give as many of each.")
    for new, old in zip(new_tensors, old_tensors, strict=True):
        if new.graph.graphs is not old.graph.graphs:
            raise UsageError(f"{new} and {old} belong to two models. Tensors are rerouted only within one model.")
        new.graph.reroute(old.ref, (), new.ref)  # validates the pair; an empty list of uses changes nothing
    return list(zip(new_tensors, old_tensors, strict=True))


def _modification_filter(can_modify: object, cannot_modify: object) -> Callable[[Operation], bool]:
    """Return a predicate of the ops that may be rerouted."""
    allowed = None if can_modify is None else frozenset(as_operations(can_modify))
    forbidden = frozenset(() if cannot_modify is None else as_operations(cannot_modify))
    return lambda op: (allowed is None or op in allowed) and op not in forbidden


def _reroute_pairs(
    pairs: Iterable[tuple[Tensor, Tensor]], may_modify: Callable[[Operation], bool], *, swap: bool
) -> int:
    def modifiable_uses(tensor: Tensor) -> list[Use]:
        return [use for use in tensor.uses() if may_modify(Operation(tensor.graph.graphs[use.graph], use.op))]

    moves = []
    for new, old in pairs:
        if new != old:
            moves += [(old, new, modifiable_uses(old))]
            moves += [(new, old, modifiable_uses(new))] if swap else []
    rerouted: list[tuple[Use, Tensor]] = []
    try:
        for old, new, uses in moves:
            rerouted += [(use, old) for use in _move_uses(old, new, uses, swap=swap)]
    except UsageError:
        for use, old in reversed(rerouted):
            old.graph.graphs[use.graph].set_source(use, old.ref)
        raise
    return len(rerouted)


def _move_uses(old: Tensor, new: Tensor, uses: list[Use], *, swap: bool) -> list[Use]:
    """Reroute the uses that still read `old` to `new`, except ancestors of `new`; return the rerouted ones."""
    current_uses = [use for use in uses if old.graph.graphs[use.graph].source_of(use) == old.ref]
    ancestors = _ancestors(new, old) if current_uses else set()
    cycle_uses = dict.fromkeys(use for use in current_uses if _enclosing_op(new, use) in ancestors)
    if cycle_uses and swap:
        first = next(iter(cycle_uses))
        raise UsageError(
            f"{new} is computed from {old} through {first}, so swapping them would create a cycle."
            f" Exclude {first.op!r} with cannot_modify, or use reroute_ts."
        )
    moved = [use for use in current_uses if use not in cycle_uses]
    new.graph.reroute(old.ref, moved, new.ref)
    return moved


def _ancestors(tensor: Tensor, stop: Tensor) -> set[str]:
    """Return the ancestors of `tensor` in its graph; the search does not go beyond the op of `stop`.

    In a graph without cycles no reader of `stop` is an ancestor of it. The back edge of a TensorFlow 1 loop is ignored.
    """
    graph, stop_op = tensor.graph, stop.ref.op if stop.graph is tensor.graph else None

    def sources(name: str) -> list[str]:
        names = graph.predecessors(name) if name != stop_op else ()
        return [source for source in names if graph.op(source).kind != "next_iteration"]

    return set(reachable([tensor.ref.op], sources))


def _enclosing_op(tensor: Tensor, use: Use) -> str | None:
    """Return the op of `tensor`'s graph that the use belongs to, directly or through nested bodies."""
    graph, op = use.graph, use.op
    while graph != tensor.graph.name:
        if (parent := tensor.graph.graphs[graph].parent) is None:
            return None
        graph, op = parent
    return op


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Signed fixed point: `bits`-bit integers with the scale 2**exponent, without the most negative integer."""

    bits: int  # 2 to 16; the recipe has 8 and 16
    exponent: int  # the scale is 2**exponent
    family: str | None = None  # the family of QDQ ops, by default that of the model's format
    # Rounding of values halfway between two steps, "half-even" or "half-up"; by default that of the ops.
    round: RoundingMode | None = None

    def __post_init__(self) -> None:
        """Check the ranges of the fields, and raise a UsageError for one that is out of range."""
        if type(self.bits) is not int or not MIN_BITS <= self.bits <= MAX_BITS:
            hint = f"Give {MIN_BITS} to {MAX_BITS}; 8 and 16 are usual."
            raise UsageError(f"FixedPoint does not support {self.bits!r} bits. {hint}")
        max_exponent = 128 - self.bits  # TensorFlow computes max - min in float32
        if type(self.exponent) is not int or not MIN_EXPONENT <= self.exponent <= max_exponent:
            raise UsageError(
                f"FixedPoint does not support the exponent {self.exponent!r}. With {self.bits} bits it is"
                f" {MIN_EXPONENT} to {max_exponent}, because the range must fit float32."
            )
        if self.family is not None and (not isinstance(self.family, str) or self.family not in FAMILIES):
            suggestion = did_you_mean(str(self.family), FAMILIES) or f" Known are {', '.join(FAMILIES)}."
            raise UsageError(f"There is no family {self.family!r}.{suggestion}")
        if self.round is not None and (not isinstance(self.round, str) or self.round not in ROUNDING_MODES):
            message = f"FixedPoint does not support the rounding {self.round!r}."
            raise UsageError(f"{message} Give 'half-even' or 'half-up', or omit it.")

    @property
    def scale(self) -> float:
        """The step between two values."""
        return math.ldexp(1, self.exponent)

    @property
    def max(self) -> float:
        """The largest value, (2**(bits - 1) - 1) * 2**exponent."""
        return ((1 << (self.bits - 1)) - 1) * self.scale

    @property
    def min(self) -> float:
        """The smallest value, -max."""
        return -self.max

    def params(self) -> QParams:
        """Return scale, zero point and range."""
        return qparams_from_scale(np.asarray(self.scale), np.asarray(0), IntType(self.bits, signed=True), narrow=True)


@checks_types
def insert_quant_op(graph: Model, producer: str | Tensor, name: str, quantizer: FixedPoint) -> int:
    """Quantize `producer` for its consumers with `name` in their op names, and for no others.

    The new ops are in the scope `name/SlimQuant`, where `select_ts` finds their tensors. Graph outputs and ops that
    graphquant inserted do not count as consumers. The model is edited in place; `model.save(path)` writes it.

    Args:
        graph: The model.
        producer: A kernel or a layer's output: a tensor, or its name as for `get_tensor_by_name`. If function clones
            contain it, each clone is edited.
        name: Part of the consumers' names, usually a layer's name.
        quantizer: The fixed-point format.

    Returns:
        The number of rerouted inputs.

    Raises:
        UsageError: There is no such producer or it has no such consumer, the ops do not support the request, or `name`
            is not a valid scope. The model is then unchanged.
    """
    producers = [producer] if isinstance(producer, Tensor) else find_tensors(graph, producer)
    readers = ((tensor, tensor.consumers()) for tensor in producers)
    consumers = {tensor: [op for op in ops if name in op.name and _is_model_op(op)] for tensor, ops in readers}
    if not any(consumers.values()):
        raise UsageError(_no_consumer_message(producers, name))
    quantized = [tensor for tensor in producers if consumers[tensor]]
    for tensor in quantized:
        _require_quantizable(graph, tensor, name, quantizer)
    return sum(
        reroute_ts(make_quant_op(graph, tensor, name, quantizer), tensor, can_modify=consumers[tensor])
        for tensor in quantized
    )


@checks_types
def make_quant_op(graph: Model, tensor: Tensor, name: str, quantizer: FixedPoint) -> Tensor:
    """Add a quantizer after `tensor`, in the scope `name/SlimQuant` of the model `graph`.

    Returns:
        The output of the quantizer, which has no readers yet, for `reroute_ts`.

    Raises:
        UsageError: The ops do not support the request, or `name` is not a valid scope.
    """
    family = _require_quantizable(graph, tensor, name, quantizer)
    owner, output = tensor.graph, tensor.op.node.outputs[tensor.ref.port]
    lowering = QDQSite(
        tensor=tensor.ref,
        name=owner.unique_name(f"{name.strip('/')}/{QUANT_SCOPE}/quant"),
        params=quantizer.params(),
        rule=RULE_NAME,
        shape=output.shape,
        rounding_mode=quantizer.round,
        in_frame=any(op.kind in FRAME_KINDS for op in owner.ops()),
        opset=graph.opset,
    )
    return Tensor(owner, family.add_ops(owner, lowering))


def _is_model_op(op: Operation) -> bool:
    """Return True for ops of the model itself, False for inserted ones and graph outputs."""
    return op.kind not in {"output", *QUANTIZATION_KINDS} and f"/{QUANT_SCOPE}/" not in f"/{op.name}"


def _require_quantizable(model: Model, tensor: Tensor, name: str, quantizer: FixedPoint) -> QDQFamily:
    """Return the family for the tensor. An impossible request is refused before anything is changed."""
    if not isinstance(model, Model):
        message = f"A quantizer needs the model, but this is a {type(model).__name__}."
        raise UsageError(f"{message} Pass the result of gq.load.")
    if tensor.graph.graphs is not model.graphs:
        raise UsageError(f"{tensor} belongs to another model. Select it in the edited model.")
    scope = name.strip("/")
    if not scope or (model.format == "tensorflow" and not _TENSORFLOW_SCOPE.fullmatch(scope)):
        raise UsageError(f"{name!r} is not a valid scope for new ops. Give a part of a layer's name that is a scope.")
    family = FAMILIES[quantizer.family or formats.format_module(model.format).DEFAULT_FAMILY]
    if family.format != model.format:
        families = ", ".join(candidate.name for candidate in FAMILIES.values() if candidate.format == model.format)
        raise UsageError(f"The family {family.name!r} is for {family.format} models. This model supports: {families}.")
    if tensor.dtype is None:
        raise UsageError(f"The data type of {tensor} is unknown before a run. Quantize its input instead.")
    kind = IntType(quantizer.bits, signed=True)
    request = FamilyRequest(type=kind, axis=None, dtype=tensor.dtype, shape=tensor.shape, rounding_mode=quantizer.round)
    reason = family.unsupported_reason(request)
    if reason:
        message = f"{tensor} cannot be quantized by {family.name}: {reason}."
        raise UsageError(f"{message} Choose other bits or another tensor.")
    if model.opset and model.opset < family.minimum_opset(request):
        raise UsageError(
            f"The model has opset {model.opset}, but {family.name} needs {family.minimum_opset(request)} for this. Use"
            " rules with `graphquant insert`, which converts the model first."
        )
    return family


def _no_consumer_message(producers: list[Tensor], name: str) -> str:
    """Return the error for a producer without consumers of that name; it lists the actual readers."""
    consumers = list(dict.fromkeys(op for tensor in producers for op in tensor.consumers()))
    readers = list(dict.fromkeys(op.name for op in consumers if _is_model_op(op)))
    inserted = [op.name for op in consumers if name in op.name and op.kind != "output" and not _is_model_op(op)]
    reader_list = join_limited(list(map(repr, readers)), MAX_LISTED_CONSUMERS)
    hint = f"It is read by {reader_list}" if readers else "No op of a layer reads it"
    hint += f", and {inserted[0]!r} was inserted earlier" if inserted else ""
    return f"No op whose name contains {name!r} reads {producers[0]}. {hint}.{did_you_mean(name, readers)}"
