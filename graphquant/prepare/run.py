"""The named steps before matching. Each does only what rules ask for, and leaves what is needed to take it back."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from graphquant.ir import Model, bulk, check
from graphquant.prepare import constants, fold, forwarding, inference, requantize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from graphquant.prepare.steps import Left, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """One kind of step.

    Attributes:
        why: What it is good for, for people.
        run: Changes a model and tells each change.
        left: What it leaves in a model, and why.
    """

    why: str
    run: Callable[[Model], Iterator[Step]]
    left: Callable[[Model], Iterator[Left]] | None = None


STEPS: dict[str, Preparation] = {
    requantize.NAME: Preparation(
        why="it was asked for: rules place their own quantization in the place of the model's",
        run=requantize.requantize,
        left=requantize.left,
    ),
    constants.INITIALIZERS: Preparation(
        why="a weight that callers may override is no constant, and cannot be quantized beforehand",
        run=constants.initializer_inputs,
    ),
    constants.NODES: Preparation(
        why="runtimes look for weights among the initializers",
        run=constants.constant_nodes,
        left=constants.nodes_left,
    ),
    inference.NAME: Preparation(
        why="an answer is to hang on its own sample, not on the others of its batch",
        run=inference.inference_batchnorm,
    ),
    forwarding.IDENTITY: Preparation(
        why="an op that changes nothing hides from a runtime what it could fuse",
        run=forwarding.drop_identity,
        left=partial(forwarding.kept, step=forwarding.IDENTITY),
    ),
    forwarding.DROPOUT: Preparation(
        why="outside of training it changes nothing, and hides from a runtime what it could fuse",
        run=forwarding.drop_dropout,
        left=partial(forwarding.kept, step=forwarding.DROPOUT),
    ),
    fold.NAME: Preparation(
        why="a BatchNorm between a product and its quantization keeps the product in float",
        run=fold.fold_batchnorm,
        left=fold.unfolded,
    ),
}
"""The steps by name, in the order in which they are made."""


@bulk()
def prepare(model: Model, wanted: Sequence[str]) -> tuple[Model, tuple[Step, ...]]:
    """A copy of `model` after the steps named in `wanted`, and what they did; the model itself if they did nothing.

    Raises:
        ModelError: The value of a weight is in the model's files and cannot be read.
    """
    asked = [name for name in STEPS if name in wanted]
    changed = model.copy() if asked else model
    done: list[Step] = []
    for name in asked:
        made = [replace(step, why=STEPS[name].why) for step in STEPS[name].run(changed)]
        if made:
            check(changed, name)
            done.extend(made)
    if not done:
        return model, ()
    _tell_places(model, done)
    changed.digest = prepared_digest(model.digest, done)
    return changed, tuple(done)


def left_alone(prepared: Model, wanted: Sequence[str]) -> tuple[Left, ...]:
    """What the steps named in `wanted` left in the model that they made, and what they would have done unasked.

    Raises:
        ModelError: The value of a weight is in the model's files and cannot be read.
    """
    found = list(inference.training(prepared, asked=inference.NAME in wanted))
    for name, step in STEPS.items():
        if name in wanted and step.left is not None:
            found.extend(step.left(prepared))
    return tuple(found)


def prepared_digest(source: str, steps: Sequence[Step]) -> str:
    """Hex SHA-256 that names the model `source` after `steps`."""
    if not steps:
        return source
    said = json.dumps([source, [[step.step, step.target, step.detail] for step in steps]])
    return hashlib.sha256(said.encode()).hexdigest()


def steps_told(names: Iterable[str]) -> str:
    """What a written model says of the steps that made it: the name of each, and how often; `names_told` reads it."""
    return ", ".join(f"{name} ({count})" for name, count in Counter(names).items())


def names_told(said: str) -> list[str]:
    """The names of the steps in what `steps_told` gave."""
    return [item.partition(" (")[0] for item in said.split(", ") if item]


def _tell_places(source: Model, steps: Sequence[Step]) -> None:
    """Adds to the records where among the ops of its graph each removed one was."""
    by_graph: dict[str, list[dict[str, Any]]] = {}
    for step in steps:
        for item in step.undo.get("removed", ()):
            by_graph.setdefault(item.get("graph", ""), []).append(item)
    for name, items in by_graph.items():
        order = {op.name: position for position, op in enumerate(source.graphs[name].ops())}
        for item in items:
            if item["op"] in order:
                item["position"] = order[item["op"]]
