"""All-pairs selection: a few rows of a table of test cases that have each pair of values at least once."""

from collections.abc import Hashable, Iterable
from itertools import combinations
from typing import TypeVar

Row = TypeVar("Row", bound=tuple[Hashable, ...])


def cover_pairs(rows: Iterable[Row]) -> list[Row]:
    """Return a selection that has every pair of values, in any two columns, that the rows have.

    The choice is greedy and always the same. Values that must meet in all combinations are one tuple in one column.
    """
    candidates = list(rows)
    pairs = [set(combinations(enumerate(row), 2)) for row in candidates]
    missing = set().union(*pairs)
    selected = []
    while missing:
        best = max(range(len(candidates)), key=lambda index: len(pairs[index] & missing))
        selected.append(best)
        missing -= pairs[best]
    return [candidates[index] for index in sorted(selected)]
