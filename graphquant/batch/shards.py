"""Which models of a batch are whose, where several machines do it without speaking to each other."""

from __future__ import annotations

import hashlib
import heapq
import json
from pathlib import Path
from typing import TYPE_CHECKING

from graphquant.data.files import found, remote
from graphquant.errors import GraphQuantError, UsageError
from graphquant.formats.parts import files_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.batch.types import Entry


def shard_of(entries: Sequence[Entry], shard: tuple[int, int]) -> list[Entry]:
    """The entries of one shard, in their order: all shards together have each entry once.

    The largest models are dealt out first, each to the shard with the fewest bytes so far. Every machine that sees the
    same models deals the same way.

    Args:
        entries: All of the batch.
        shard: Which part of how many, counted from 1.

    Raises:
        UsageError: There is no such part.
    """
    number, total = shard
    if not 1 <= number <= total:
        raise UsageError(f"There is no shard {number} of {total}. They are counted from 1, as in --shard 1/{total}.")
    weights = {entry.name: size_of(entry.model) for entry in entries}
    heap = [(0, place) for place in range(1, total + 1)]
    mine = set()
    for name in sorted(weights, key=lambda name: (-weights[name], name)):
        taken, place = heapq.heappop(heap)
        heapq.heappush(heap, (taken + weights[name] + 1, place))  # even empty files are work
        if place == number:
            mine.add(name)
    return [entry for entry in entries if entry.name in mine]


def dealt(entries: Sequence[Entry]) -> str:
    """A digest of what a batch is dealt out by: machines that see other models, or other sizes, deal otherwise."""
    told = json.dumps(sorted((entry.name, size_of(entry.model)) for entry in entries))
    return hashlib.sha256(told.encode(errors="surrogatepass")).hexdigest()


def size_of(model: str) -> int:
    """Bytes of a model with all its files; 0 for one that cannot be read, which whoever works on it will tell."""
    try:
        if remote(model):
            return sum(file.system.size(file.name) or 0 for file in found(model)[0])
        return sum(file.stat().st_size for file in files_of(Path(model)))
    except (GraphQuantError, OSError):
        return 0
