"""The axis of blocks in weights."""

from __future__ import annotations

import pytest

from graphquant.ir import Op, reduction_axis


@pytest.mark.parametrize(
    ("kind", "channel", "role", "shape", "expected"),
    [
        ("matmul", 1, "weight", (64, 10), 0),
        ("matmul", 2, "weight", (3, 64, 10), 1),
        ("matmul", None, "weight", (64,), None),
        ("gemm", 0, "weight", (10, 64), 1),
        ("gemm", 1, "weight", (64, 10), 0),
        ("conv", 0, "weight", (8, 3, 5, 5), 1),
        ("conv", 3, "weight", (5, 5, 3, 8), 2),
        ("conv_transpose", 1, "weight", (3, 8, 5, 5), 0),
        ("lstm", 1, "weight", (2, 40, 16), 2),
        ("gather", None, "input", (1000, 64), 1),
        ("gather", None, "indices", (3,), None),
        ("gather", None, "input", (), None),
        ("matmul", 1, "input", (64, 10), None),
        ("add", None, "input", (64, 10), None),
    ],
)
def test_reduction_axis(kind: str, channel: int | None, role: str, shape, expected: int | None) -> None:
    """Blocks lie along the input channels of a weight or the rows of a table; other tensors have no such axis."""
    op = Op(name="op", kind=kind, type=kind, channel_axis=channel)
    assert reduction_axis(op, role, shape) == expected
