"""Ops that only move values have one scale before and after them, by the rules of each backend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import graphquant as gq
from graphquant.rules import shipped_rule_files

MOVES = {
    "MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)": (1, 8, 4, 4),
    "Flatten(r)": (1, 512),
    "Slice(r, zeros, halves)": (1, 4, 4, 4),
    "Expand(g, full)": (1, 8, 8, 8),
    "Tile(r, twice)": (1, 8, 8, 16),
    "Gather<axis = 1>(r, even)": (1, 4, 8, 8),
    "DepthToSpace<blocksize = 2>(r)": (1, 2, 16, 16),
    "SpaceToDepth<blocksize = 2>(r)": (1, 32, 4, 4),
    "Split<axis = 1>(r)": (1, 4, 8, 8),
    "Transpose<perm = [0, 2, 3, 1]>(r)": (1, 8, 8, 8),
    "Reshape(r, rows)": (1, 64, 8),
    "Unsqueeze(r, one)": (1, 1, 8, 8, 8),
    "Squeeze(g, last)": (1, 8),
}
"""Ops on an activation `r` or on its mean `g` of each channel, with the shapes of their first outputs."""

INDICES = {
    "zeros": (0, 0, 0, 0), "halves": (1, 4, 4, 4), "full": (1, 8, 8, 8), "twice": (1, 1, 1, 2), "even": (0, 2, 4, 6),
    "rows": (1, 64, 8), "one": (1,), "last": (2, 3),
}  # fmt: skip


def save_moves(folder: Path) -> Path:
    """Save a model in which a product reads the result of each op, with its data beside it."""
    dice = np.random.default_rng(0)
    weights = {"w": dice.normal(size=(8, 3, 3, 3)), "b": dice.normal(size=8)}
    body, outputs = "c = Conv<pads = [1, 1, 1, 1]>(x, w, b) r = Relu(c) g = GlobalAveragePool(r)", []
    for index, (move, shape) in enumerate(MOVES.items()):
        second = f", other{index}" if move.startswith("Split") else ""
        body += f" t{index}{second} = {move} y{index} = Mul(t{index}, k{index})"
        outputs.append(f"float{list(shape)} y{index}")
        weights[f"k{index}"] = dice.normal(size=shape)
    message = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> m (float[1, 3, 8, 8] x) => ({", ".join(outputs)}) {{{body}}}'
    )
    constants = {name: value.astype(np.float32) for name, value in weights.items()}
    constants |= {name: np.array(value, np.int64) for name, value in INDICES.items()}
    message.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    onnx.save(message, folder / "moves.onnx")
    np.savez(folder / "moves.npz", x=dice.normal(size=(8, 3, 8, 8)).astype(np.float32))
    return folder / "moves.onnx"


@pytest.mark.parametrize("rules", sorted(shipped_rule_files()))
def test_moved_values_keep_their_scale(tmp_path: Path, rules: str) -> None:
    """`check` finds no op that moves values between two scales."""
    path = save_moves(tmp_path)
    result = gq.insert(path, rules=[rules], data=str(path.with_suffix(".npz")), validate=False, allow_empty=True)
    assert [finding for finding in gq.check(result.model).findings if finding.code == "GQ103"] == []
