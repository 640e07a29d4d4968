"""Blocks of models between narrow cuts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

import graphquant as gq
from graphquant.api.plan import prepare_and_plan
from graphquant.optimize.blocks import MAX_BLOCK_OPS, Block, find_blocks
from graphquant.optimize.repair import group_by_block, split_block

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.quantize import Plan


class Net:
    """A graph of square convolutions, which is written op by op."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def op(self, kind: str, *inputs: str) -> str:
        """Add an op, and return its output; a convolution gets a weight."""
        name = f"{kind.lower()}{len(self.nodes)}"
        if kind == "Conv":
            self.weights.append(onnx.numpy_helper.from_array(np.ones((4, 4, 1, 1), np.float32), f"w{len(self.nodes)}"))
            inputs = (*inputs, self.weights[-1].name)
        self.nodes.append(onnx.helper.make_node(kind, inputs, [name], name=name))
        return name

    def block(self, x: str, count: int) -> str:
        """Add convolutions with a Relu each and a sum with their input."""
        y = x
        for _ in range(count):
            y = self.op("Relu", self.op("Conv", y))
        return self.op("Add", y, x)

    def plan(self, output: str, path: Path) -> tuple[gq.Model, Plan]:
        """Return the prepared net and its plan by the default rules."""
        value_info = onnx.helper.make_tensor_value_info
        infos = [value_info(name, onnx.TensorProto.FLOAT, [1, 4, 8, 8]) for name in ("x", output)]
        graph = onnx.helper.make_graph(self.nodes, "net", infos[:1], infos[1:], self.weights)
        opsets = [onnx.helper.make_opsetid("", 17)]
        onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
        return prepare_and_plan(gq.load(path))

    def find_blocks(self, output: str, path: Path) -> tuple[Block, ...]:
        """Return the blocks of the net by the default rules."""
        prepared, plan = self.plan(output, path)
        blocks = find_blocks(prepared, plan, range(len(plan.sites)))
        assert sorted(index for block in blocks for index in block.sites) == list(range(len(plan.sites)))
        for block in blocks:
            tensors = {plan.sites[index].tensor.op for index in block.sites if not plan.sites[index].parameter}
            assert {op for _, op in block.ops}.isdisjoint(
                op for other in blocks if other != block for _, op in other.ops
            )
            assert tensors <= {node.name for node in self.nodes} | {"x"}
        return blocks


def count_ops(blocks: tuple[Block, ...]) -> list[int]:
    """Return the number of weighted ops of each block."""
    return [len(block.ops) for block in blocks]


def test_a_stem_with_its_activation_and_residual_blocks(tmp_path: Path) -> None:
    """Each convolution of a chain is a block with its activation, and a residual block is one."""
    net = Net()
    stem = net.op("Conv", "x")
    stem = net.op("Mul", stem, net.op("Sigmoid", stem))
    output = net.op("Conv", net.op("Relu", net.op("Conv", net.block(net.block(stem, 2), 3))))
    blocks = net.find_blocks(output, tmp_path / "net.onnx")
    assert count_ops(blocks) == [1, 2, 3, 1, 1]
    assert [block.name for block in blocks] == ["conv0", "conv3 to conv5", "conv8 to conv12", "conv15", "conv17"]


def test_a_tensor_behind_a_float_activation_belongs_to_its_readers(tmp_path: Path) -> None:
    """The block that computes it need not be float; that of the convolution in front of a Relu must."""
    net = Net()
    gate = net.op("Conv", "x")
    gate = net.op("Mul", gate, net.op("Sigmoid", gate))
    relu = net.op("Relu", net.op("Conv", gate))
    prepared, plan = net.plan(net.op("Conv", relu), tmp_path / "net.onnx")
    blocks = find_blocks(prepared, plan, range(len(plan.sites)))
    keys = {
        plan.sites[index].tensor.op: len(group.ops)
        for group in group_by_block(prepared, plan, blocks)
        for index in group.sites
    }
    assert (keys[gate], keys[relu]) == (1, 2)


def test_a_tensor_between_sums_costs_no_weighted_op(tmp_path: Path) -> None:
    """A sum that only a sum reads can be float without the convolutions of its block."""
    net = Net()
    first = net.op("Relu", net.op("Conv", "x"))
    inner = net.op("Add", net.op("Relu", net.op("Conv", first)), first)
    outer = net.op("Add", inner, first)
    prepared, plan = net.plan(net.op("Conv", outer), tmp_path / "net.onnx")
    blocks = find_blocks(prepared, plan, range(len(plan.sites)))
    split = [part for block in blocks for part in split_block(prepared, plan, block)]
    assert sorted(index for part in split for index in part.sites) == list(range(len(plan.sites)))
    free = [(part.name, [plan.sites[index].tensor.op for index in part.sites]) for part in split if not part.ops]
    assert free == [(inner, [inner])]


def test_a_skip_over_the_whole_net(tmp_path: Path) -> None:
    """A run without a narrow cut is split at wider ones if it is long, and is one block otherwise."""
    for count, blocks in ((MAX_BLOCK_OPS, [1, MAX_BLOCK_OPS]), (MAX_BLOCK_OPS + 1, [1] * (MAX_BLOCK_OPS + 2))):
        net = Net()
        output = net.block(net.op("Conv", "x"), count)
        found = net.find_blocks(net.op("Relu", output), tmp_path / "net.onnx")
        assert count_ops(found) == blocks


@pytest.mark.parametrize("name", ["digits_cnn.onnx", "digits_nested.onnx", "digits_rnn.onnx"])
def test_each_op_is_in_one_block(samples: Path, name: str) -> None:
    """Functions and branches have blocks of their own; the order is that of the graphs."""
    prepared, plan = prepare_and_plan(gq.load(samples / name))
    blocks = find_blocks(prepared, plan, range(len(plan.sites)))
    ops = [op for block in blocks for op in block.ops]
    assert len(ops) == len(set(ops)) > 2
    assert all(len({graph for graph, _ in block.ops}) <= 1 for block in blocks)
    some = find_blocks(prepared, plan, blocks[0].sites)
    assert [block.sites for block in some] == [blocks[0].sites]
