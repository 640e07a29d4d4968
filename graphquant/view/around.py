"""The neighbourhood of an op, cut out of a drawing."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import named

if TYPE_CHECKING:
    from graphquant.view.drawing import Drawing


def around(drawing: Drawing, what: str, hops: int) -> tuple[Drawing, list[int]]:
    """The part of a drawing that is at most `hops` wires away from an op, a tensor, or one of the ops of a badge.

    Returns:
        The part, and which of its boxes `what` names.

    Raises:
        UsageError: Nothing that is drawn is called `what`.
    """
    starts = _called(drawing, what)
    near: list[list[int]] = [[] for _ in drawing.boxes]
    for wire in drawing.wires:
        near[wire.source].append(wire.target)
        near[wire.target].append(wire.source)
    far = dict.fromkeys(starts, 0)
    queue = deque(starts)
    while queue:
        here = queue.popleft()
        for other in near[here] if far[here] < hops else ():
            if other not in far:
                far[other] = far[here] + 1
                queue.append(other)
    kept = sorted(far)
    numbers = {box: number for number, box in enumerate(kept)}
    part = replace(
        drawing,
        boxes=[drawing.boxes[box] for box in kept],
        wires=[
            replace(wire, source=numbers[wire.source], target=numbers[wire.target])
            for wire in drawing.wires
            if wire.source in numbers and wire.target in numbers
        ],
        controls=[
            (numbers[source], numbers[target])
            for source, target in drawing.controls
            if source in numbers and target in numbers
        ],
    )
    return part, [numbers[box] for box in starts]


def _called(drawing: Drawing, what: str) -> list[int]:
    """The boxes that `what` names."""
    names: dict[str, list[int]] = {}
    for number, box in enumerate(drawing.boxes):
        full = named(box.graph, box.op.name)
        names.setdefault(full, []).append(number)
        for port, output in enumerate(box.op.outputs):
            names.setdefault(f"{full}:{port}", []).append(number)
            names.setdefault(output.name, []).append(number)
        for constant in box.constants:
            names.setdefault(constant.name, []).append(number)
    for wire in drawing.wires:
        for badge in wire.badges:
            for _, name in drawing.folded[badge]:
                names.setdefault(name, []).append(wire.target)
    if what not in names:
        more = did_you_mean(what, names) or " `graphquant inspect --format graph-json` lists the names."
        raise UsageError(f"Nothing that is drawn is called {what!r}.{more}")
    return list(dict.fromkeys(names[what]))
