"""What models take in onnxruntime: in all, and by op, as its profiler tells."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from onnx import NodeProto

from graphquant.formats import Spent
from graphquant.formats.onnx.read import index
from graphquant.formats.onnx.run import contents, run_session, session
from graphquant.formats.onnx.write import emit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphquant.formats import Feeds
    from graphquant.ir import Model

    Place = tuple[str, str]

RUNS, SECONDS = 100, 0.4
"""Runs that are profiled at most, and how long; there are at least `FEW`."""

FEW = 5

OVERHEAD, OWN = 5e-6, 0.5e-6
"""What profiling adds to an op at most, and what an op that does nothing takes without it, seconds."""

LABEL = re.compile("@([0-9]{1,9})@")
"""A node's number, which its name is while it is profiled: what onnxruntime makes of nodes has parts of their names."""

MADE = re.compile(r"(_nchwc|_q|_dq|_q_to_dq)$")
"""What onnxruntime puts behind the name of a tensor to name an op after it."""

HOLDING = frozenset({"Loop", "If", "Scan"})
"""Types whose time is that of the ops inside, which are told too."""

CONVERTING = frozenset({"QuantizeLinear", "DequantizeLinear"})


def timed(model: Model, feeds: Sequence[Feeds]) -> Callable[[], object]:
    """What runs the model once on each of `feeds`, in a session of its own on one thread.

    Raises:
        ModelError: onnxruntime cannot take the model, or a run failed.
    """
    data, external = contents(emit(model).message)
    started = session(data, model.source.folder, external, timed=True)
    for feed in feeds:
        run_session(started, None, feed)
    return lambda: [started.run(None, feed) for feed in feeds]


def spent(model: Model, feeds: Sequence[Feeds]) -> Spent:
    """Seconds that each op takes in a run; those of several that became one are told of one of them.

    Raises:
        ModelError: onnxruntime cannot take the model, or a run failed.
    """
    message = emit(model).message
    places = _labelled(message, model.path)
    data, external = contents(message)
    with TemporaryDirectory() as folder:
        started = session(data, model.source.folder, external, timed=True, profile=Path(folder, "run"))
        for feed in feeds:
            run_session(started, None, feed)
        runs, end = 1, time.perf_counter() + SECONDS
        while runs < FEW or (runs < RUNS and time.perf_counter() < end):
            for feed in feeds:
                started.run(None, feed)
            runs += 1
        events = json.loads(Path(started.end_profiling()).read_bytes())
    return _summed(_durations(events), places, runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """The ops that a message's nodes are, by their number and by what they make."""

    numbered: Sequence[Place]
    makers: Mapping[str, Place]

    def of(self, name: str) -> Place | None:
        """The op that one of onnxruntime's is, by its name."""
        label = LABEL.search(name)
        if label is not None and int(label[1]) < len(self.numbered):
            return self.numbered[int(label[1])]
        return self.makers.get(MADE.sub("", name)) or self.makers.get(name)


def _labelled(message: Any, path: Path | None) -> _Places:
    """Names each node of the message by a number."""
    numbered: list[Place] = []
    makers: dict[str, Place] = {info.name: ("", info.name) for info in message.graph.input}
    for graph in index(message, path=path).graphs.values():
        for op in graph.ops():
            if isinstance(op.source, NodeProto):
                op.source.name = f"@{len(numbered)}@"
                numbered.append((graph.name, op.name))
                makers.update(dict.fromkeys(filter(None, op.source.output), (graph.name, op.name)))
    return _Places(numbered=numbered, makers=makers)


def _durations(events: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[float]]:
    """For each of onnxruntime's ops, by name and type, the seconds that its runs took."""
    found: dict[tuple[str, str], list[float]] = {}
    for event in events:
        name = event.get("name", "")
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            key = name.removesuffix("_kernel_time"), event["args"]["op_name"]
            found.setdefault(key, []).append(event["dur"] * 1e-6)
    return {key: taken for key, taken in found.items() if key[1] not in HOLDING}


def _summed(durations: Mapping[tuple[str, str], list[float]], places: _Places, runs: int) -> Spent:
    """What is told of onnxruntime's ops as that of the model's, without what the profiler itself takes."""
    means = {key: _mean(taken) for key, taken in durations.items()}
    extra = min(min(means.values(), default=0.0), OVERHEAD)
    ops: dict[Place, float] = {}
    conversions: dict[Place, float] = {}
    for (name, kind), value in means.items():
        place = places.of(name)
        if place is not None:
            into = conversions if kind in CONVERTING else ops
            count = len(durations[name, kind]) / runs
            into[place] = into.get(place, 0.0) + max(value - extra, 0.0) * count + OWN * count
    return Spent(ops=ops, conversions=conversions)


def _mean(taken: list[float]) -> float:
    """The mean of the shorter half, for whole microseconds are told and a few runs are interrupted."""
    return mean(sorted(taken)[: max(len(taken) // 2, 1)])


__all__ = ["spent", "timed"]
