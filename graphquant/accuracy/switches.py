"""A quantized model in which each quantization is taken out, left in, or switched by an input of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant.ir import Op, Output, TensorRef, bulk
from graphquant.qdq.base import constant
from graphquant.rewrite import FRAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from graphquant.ir import Model
    from graphquant.numerics import Array

PREFIX = "graphquant/switch"
"""What the inputs are called, each with the number of its quantization."""

SELECTS = {"onnx": "Where", "tensorflow": "SelectV2"}
"""The op that takes its second input where the first is true, else its third."""

CONSTANTS = {"onnx": "Constant", "tensorflow": "Const"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """A quantization of a model, and what there is without it.

    Attributes:
        after: What it makes.
        before: The float tensor that it stands for; what gives the values where the model stores integers alone.
    """

    after: TensorRef
    before: TensorRef | Callable[[], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switched:
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


def switchable(model: Model, choices: Sequence[Choice]) -> list[int]:
    """The positions of the choices that an input can rule: not those in functions, nor in TensorFlow 1's frames."""
    blind = {
        name
        for name, graph in model.graphs.items()
        if not graph.sees("") or any(op.kind in FRAMES for op in graph.ops())
    }
    return [index for index, choice in enumerate(choices) if not {*_places(model, choice)} & blind]


@bulk()
def switched(model: Model, choices: Sequence[Choice], *, by_input: Iterable[int], on: Collection[int] = ()) -> Switched:
    """`model` with some quantizations behind switches, those `on` as they are, and all others taken out.

    Args:
        model: The quantized model.
        choices: Its quantizations.
        by_input: Positions of those that get a switch; they must be `switchable`.
        on: Positions of those that stay.
    """
    changed, inputs = model.copy(), {}
    moved: dict[TensorRef, TensorRef] = {}
    wanted = set(by_input)
    for index, choice in enumerate(choices):
        if index in on:
            continue
        uses = changed.graphs[choice.after.graph].consumers(choice.after)
        instead = _before(changed, choice, moved)
        if index in wanted:
            inputs[index] = _input(changed, index)
            instead = _select(changed, inputs[index], choice.after, instead)
        changed.graphs[choice.after.graph].reroute(choice.after, uses, instead)
        moved[choice.after] = instead
    return Switched(model=changed, inputs=inputs)


def _places(model: Model, choice: Choice) -> set[str]:
    """The graphs that make and read what is chosen."""
    after = choice.after
    return {after.graph, *(use.graph for use in model.graphs[after.graph].consumers(after))}


def _before(model: Model, choice: Choice, moved: Mapping[TensorRef, TensorRef]) -> TensorRef:
    """The float tensor in place of a quantized one."""
    if isinstance(choice.before, TensorRef):
        return moved.get(choice.before, choice.before)
    graph = model.graphs[choice.after.graph]
    name = graph.fresh(f"{choice.after.op}/float")
    return constant(graph, name, choice.before(), type_=CONSTANTS[model.format], rule="")


def _input(model: Model, index: int) -> str:
    """A new boolean input of the main graph, off by default where the format has such."""
    main = model.main
    name = main.fresh(f"{PREFIX}_{index}")
    if model.format == "onnx":
        main.add(Op(name=name, kind="input", type="", roles=(), outputs=(Output(name, "bool", ()),)))
    else:
        off = constant(main, main.fresh(f"{name}/off"), np.array(0, np.bool_), type_="Const", rule="")
        known = (Output(f"{name}:0", "bool", ()),)
        main.add(Op(name=name, kind="input", type="PlaceholderWithDefault", attrs={"shape": ()}, outputs=known), [off])
    main.inputs.append(name)
    return name


def _select(model: Model, switch: str, quantized: TensorRef, plain: TensorRef) -> TensorRef:
    """Adds an op that is `quantized` where the switch is on, else `plain`."""
    graph = model.graphs[quantized.graph]
    name = graph.fresh(f"{switch}/select")
    known = replace(model.output(quantized), name=name if model.format == "onnx" else f"{name}:0")
    op = Op(name=name, kind="where", type=SELECTS[model.format], roles=("condition", "input"), outputs=(known,))
    return graph.add(op, [TensorRef("", switch), quantized, plain])


__all__ = ["Choice", "Switched", "switchable", "switched"]
