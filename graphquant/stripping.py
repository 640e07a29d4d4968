"""Quantization taken out of a graph again: readers get back what was quantized, and integers become floats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from graphquant.errors import InternalError
from graphquant.ir import Model, Op, Output, Parameters, TensorRef, Use, bulk, check
from graphquant.numerics import QParams, dequantize
from graphquant.pairs import inserted
from graphquant.prepare import drop_unread
from graphquant.prepare.run import STEPS
from graphquant.qdq import params_of

if TYPE_CHECKING:
    from graphquant.numerics import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What `take_out` took out.

    Attributes:
        model: The model without it.
        ops: The quantization ops that are gone, in the order of the model.
        weights: The constants that were integers and are floats again, and how they are rounded.
        left: Quantization ops that are still there, with the reason.
        passed: Arguments of functions in whose place there is a constant in the function now.
    """

    model: Model
    ops: tuple[TensorRef, ...]
    weights: tuple[tuple[TensorRef, QParams], ...]
    left: tuple[tuple[TensorRef, str], ...]
    passed: tuple[TensorRef, ...]


@bulk()
def take_out(model: Model) -> Removed:
    """A copy of `model` without the quantization that graphquant inserted.

    Raises:
        ModelError: The value of a weight is in the model's files and cannot be read.
    """
    return _Remover(model).run()


class _Remover:
    """Takes quantization out of a copy of `model`."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._changed = model.copy()
        self._parameters = Parameters(model)
        self._floats: dict[tuple[str, str, bytes], tuple[TensorRef, QParams]] = {}
        self._left: dict[TensorRef, str] = {}
        self._passed: dict[TensorRef, None] = {}

    def run(self) -> Removed:
        changed = self._changed
        changed.provenance = {}
        ours = [
            TensorRef(name, op.name)
            for name, graph in self._model.graphs.items()
            for op in graph.ops()
            if self._takes(op)
        ]
        for made in ours:
            self._reroute(made)
        gone = [made for made in reversed(ours) if self._remove(made)]
        drop_unread(changed, [slot for made in gone for slot in self._slots(made)])
        self._sweep()
        check(changed, "strip")
        return Removed(
            model=changed,
            ops=tuple(reversed(gone)),
            weights=tuple(self._floats.values()),
            left=tuple(self._left.items()),
            passed=tuple(self._passed),
        )

    def _takes(self, op: Op) -> bool:
        """Whether `op` is to be taken out."""
        ours = bool(op.rule) and op.rule not in STEPS
        return ours and inserted(op)

    def _slots(self, made: TensorRef) -> list[TensorRef]:
        """What an op of the model as it was reads."""
        return [slot for slot in self._model.graphs[made.graph].slots(made.op) if slot is not None]

    def _reroute(self, made: TensorRef) -> None:
        """Gives the readers of a quantized tensor what it is before that."""
        op = self._model.op(made)
        uses = [use for use in self._changed.graphs[made.graph].consumers(made) if not self._is_taken(use)]
        if not uses:
            return
        if op.kind == "quantize":
            self._left[made] = "ops read its integers"
            return
        before = self._before(made)
        if before is None:
            self._left[made] = "it reads integers that the model computes, or its scale is not in the model"
        else:
            self._changed.graphs[made.graph].reroute(made, uses, before)

    def _is_taken(self, use: Use) -> bool:
        return use.slot == 0 and self._takes(self._changed.graphs[use.graph].op(use.op))

    def _before(self, made: TensorRef) -> TensorRef | None:
        """The float tensor that `made` was quantized from; None if there is none."""
        here = made
        for _ in range(len(self._model.graphs[made.graph]) + 1):  # a broken model may hold a ring
            op = self._model.op(here)
            if not self._takes(op):
                return here
            slots = self._model.graphs[here.graph].slots(here.op)
            if not slots or slots[0] is None:
                return None
            source = self._model.op(slots[0])
            if op.kind == "dequantize" and not (source.kind == "quantize" and self._takes(source)):
                return self._floated(here, slots[0])
            here = slots[0]
        return None

    def _floated(self, made: TensorRef, integers: TensorRef) -> TensorRef | None:
        """A constant with the values of a weight that is stored as integers."""
        op = self._model.op(made)
        params = params_of(self._model.graphs[made.graph], op, self._parameters)
        if not isinstance(params, QParams) or not self._parameters.is_parameter(integers):
            return None
        home, name = self._home(made, op.anchor) if op.anchor else (made.graph, f"{integers.op}/float")
        key = (home, name, params.scale.tobytes() + params.zero_point.tobytes())
        if key in self._floats:
            return self._floats[key][0]
        graph, dtype = self._changed.graphs[home], op.outputs[0].dtype or "float32"
        if name in graph and graph.op(name).kind == "input":
            self._passed[TensorRef(home, name)] = None
        label = graph.fresh(name)
        constant = Op(
            name=label,
            kind="constant",
            type="Constant",
            roles=(),
            outputs=(Output(label, dtype, self._model.output(integers).shape),),
            value=partial(_value, self._parameters, integers, params, dtype),
        )
        floated = graph.add(constant)
        self._floats[key] = floated, params
        return floated

    def _home(self, made: TensorRef, anchor: str) -> tuple[str, str]:
        """The graph and the op of the tensor that an op says it was made for: its own graph or one around it."""
        name, here = anchor.rpartition(":")[0], self._model.graphs[made.graph]
        while here.name and not name.startswith(f"{here.name}/") and here.parent is not None:
            here = self._model.graphs[here.parent[0]]
        return here.name, name.removeprefix(f"{here.name}/") if here.name else name

    def _remove(self, made: TensorRef) -> bool:
        """Takes an op out that nobody reads any more; tells whether it is gone."""
        graph = self._changed.graphs[made.graph]
        if graph.nx.adj[made.op]:
            self._left.setdefault(made, "ops that stay read it")
            return False
        graph.remove(made.op)
        return True

    def _sweep(self) -> None:
        """Takes out what stood beside: variables of learned ranges, and what fills them."""
        for graph in self._changed.graphs.values():
            for op in reversed(list(graph.ops())):
                beside = bool(op.rule) and op.rule not in STEPS and op.kind not in {"output", "input"}
                if beside and op.name in graph and not graph.nx.adj[op.name] and not self._takes(op):
                    graph.remove(op.name)


def _value(parameters: Parameters, integers: TensorRef, params: QParams, dtype: str) -> Array:
    """The weight as floats."""
    value = parameters.value(integers)
    if value is None:
        raise InternalError(f"the weight {integers} is not there any more.")
    return dequantize(value, params).astype(dtype, copy=False)


__all__ = ["Removed", "take_out"]
