"""Rails of the ASCII graph: the glyph at each column shows which rails end, continue or pass."""

from __future__ import annotations

import pytest

from graphquant.visualize.graph_export import _fork_line, _op_line

A, B, C, D = (0, 0), (1, 0), (2, 0), (3, 0)


@pytest.mark.parametrize(
    ("rails", "inputs", "later_readers", "line"),
    [
        ([A, B, C], [A, C], {A: 1, C: 0}, "├─┼─●"),
        ([A, B, C], [A, C], {A: 0, C: 1}, "●─┼─┤"),
        ([A, B], [A, B], {A: 0, B: 0}, "●─╯"),
        ([A, None, C], [A, C], {A: 0, C: 0}, "●───╯"),
        ([A, B], [], {}, "│ │ ●"),
        ([A, B, C], [A, B, C], {A: 0, B: 1, C: 0}, "●─┼─╯"),
        ([A, B, C, D], [B], {B: 0}, "│ ● │ │"),
    ],
)
def test_glyphs_of_an_op(rails: list, inputs: list, later_readers: dict, line: str) -> None:
    """A rail that ends joins with a corner, one that continues with a tee, and one that passes is crossed."""
    unread = {tensor: later_readers[tensor] + 1 for tensor in inputs}
    assert _op_line(rails, inputs, unread, "●")[1] == line


@pytest.mark.parametrize(
    ("rails", "column", "line"),
    [([A], 0, "├─┼─╮"), ([A, B], 0, "├─┼─┼─╮"), ([A, None], 0, "├───┼─╮"), ([A, B], 1, "│ ├─┼─╮")],
)
def test_glyphs_of_a_fork(rails: list, column: int, line: str) -> None:
    """Further outputs get rails at the right, across the rails in between."""
    assert _fork_line(rails, column, [C, D]) == line
