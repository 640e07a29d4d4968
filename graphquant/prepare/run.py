"""The named steps before matching. Each does only what rules ask for, and leaves what is needed to take it back."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from graphquant.ir import Model, bulk, check
from graphquant.prepare import fold, inference
from graphquant.prepare.steps import Left, Step, encoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@bulk()
def prepare(model: Model, wanted: Sequence[str]) -> tuple[Model, tuple[Step, ...]]:
    """A copy of `model` after the steps named in `wanted`, and what they did; the model itself if they did nothing.

    Raises:
        ModelError: The value of a weight is in the model's files and cannot be read.
    """
    steps = [(name, step) for name, step in STEPS.items() if name in wanted]
    changed = model.copy() if steps else model
    done: list[Step] = []
    for name, step in steps:
        done.extend(step(changed))
        check(changed, name)
    if not done:
        return model, ()
    changed.digest = prepared_digest(model.digest, done)
    return changed, tuple(done)


def left_alone(prepared: Model, wanted: Sequence[str]) -> tuple[Left, ...]:
    """What the steps named in `wanted` left in the model that they made, and what they would have done unasked.

    Raises:
        ModelError: The value of a weight is in the model's files and cannot be read.
    """
    found = list(inference.training(prepared, asked=inference.NAME in wanted))
    if fold.NAME in wanted:
        found.extend(fold.unfolded(prepared))
    return tuple(found)


def prepared_digest(source: str, steps: Sequence[Step]) -> str:
    """Hex SHA-256 that names the model `source` after `steps`."""
    if not steps:
        return source
    said = json.dumps([source, [[step.step, step.target, step.detail] for step in steps]])
    return hashlib.sha256(said.encode()).hexdigest()


def _initializer_inputs(model: Model) -> Iterator[Step]:
    """Initializers that are graph inputs too (IR version 3) become constants: nobody may override them any more."""
    graph = model.main
    for position, name in enumerate(graph.inputs):
        op = graph.op(name)
        if op.value is None:
            continue
        graph.replace(replace(op, kind="constant", roles=()))
        yield Step(
            step="initializer-inputs",
            target=name,
            detail="initializer is no graph input any more",
            undo={"position": position, "input": encoded(op)},
        )
    graph.inputs = [name for name in graph.inputs if graph.op(name).kind == "input"]


STEPS: dict[str, Callable[[Model], Iterator[Step]]] = {
    "initializer-inputs": _initializer_inputs,
    inference.NAME: inference.inference_batchnorm,
    fold.NAME: fold.fold_batchnorm,
}
