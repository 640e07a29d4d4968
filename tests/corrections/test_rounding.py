"""Rounding of few bits: matrices against the real convolutions, and errors that never grow."""

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphquant.corrections.matrices import UNSEEN, added, form_of, rows_of, shrunk
from graphquant.corrections.rounding import Grid, _adapted, _compensated, _costs
from graphquant.formats.onnx import load

RNG = np.random.default_rng(5)
CONVS = {
    "plain": ((4, 3, 3, 3), {"pads": [1, 0, 1, 2]}),
    "strides": ((4, 3, 3, 2), {"strides": [2, 1], "dilations": [1, 2]}),
    "grouped": ((6, 2, 3, 3), {"group": 2}),
    "depthwise": ((8, 1, 3, 3), {"group": 4, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "same lower": ((4, 3, 2, 2), {"auto_pad": "SAME_LOWER"}),
    "one axis": ((5, 3, 4), {"pads": [1, 1]}),
}


@pytest.mark.parametrize("net", CONVS)
def test_matrices_are_the_convolution(tmp_path, net):
    """The rows times the matrices are what onnxruntime makes, position by position."""
    shape, attrs = CONVS[net]
    weight = RNG.normal(size=shape).astype(np.float32)
    channels = shape[1] * attrs.get("group", 1)
    x = RNG.normal(size=(2, channels, *[7, 6][: len(shape) - 2])).astype(np.float32)
    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], **attrs)
    info = onnx.helper.make_tensor_value_info
    ends = [info("x", 1, x.shape)], [info("y", 1, [None] * x.ndim)]
    graph = onnx.helper.make_graph([node], "g", *ends, [onnx.numpy_helper.from_array(weight, "w")])
    opsets = [onnx.helper.make_opsetid("", 13)]
    onnx.save(onnx.helper.make_model(graph, ir_version=8, opset_imports=opsets), tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    expected = np.moveaxis(session.run(None, {"x": x})[0], 1, -1).reshape(-1, shape[0])
    op = next(op for op in load(tmp_path / "m.onnx").main.ops() if op.type == "Conv")
    form = form_of(op, shape)
    rows, matrices = rows_of(op, form, x), form.split(weight)
    made = np.concatenate(list(rows @ matrices.transpose(0, 2, 1)), axis=-1)
    np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-5)
    assert np.array_equal(form.join(matrices, shape), weight)


def drawn(seed, outputs, inputs):
    """A matrix, H of correlated rows, and a grid of 4 bits."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(outputs, inputs))
    rows = rng.normal(size=(40, inputs)) @ rng.normal(size=(inputs, inputs)) + 1
    scale = np.broadcast_to(np.abs(matrix).max(1, keepdims=True) / 7, matrix.shape)
    return matrix, rows.T @ rows, Grid(scale=scale, zero=np.zeros(matrix.shape), low=-7, high=7)


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 12))
@settings(max_examples=60)
def test_adaptive_rounding_never_costs(seed, outputs, inputs):
    """No output's error is larger than that of nearest rounding, and each weight is at a step beside it."""
    matrix, hessian, grid = drawn(seed, outputs, inputs)
    made = _adapted(matrix, hessian, grid)
    costs = [_costs(one - matrix, hessian) for one in (made, grid.nearest(matrix))]
    assert (costs[0] <= costs[1] * (1 + 1e-9) + 1e-12).all()
    steps = made / grid.scale
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-9)
    assert (np.abs(made - matrix) <= grid.scale * (1 + 1e-9)).all()
    assert np.array_equal(made, _adapted(matrix, hessian, grid))


def test_both_halve_the_error_of_correlated_inputs():
    """Over 20 drawn matrices the squared errors are less than half of nearest rounding's."""
    total = np.zeros(3)
    for seed in range(20):
        matrix, hessian, grid = drawn(seed, 8, 24)
        ways = (grid.nearest(matrix), _compensated(matrix, hessian, grid), _adapted(matrix, hessian, grid))
        total += [_costs(one - matrix, hessian).sum() for one in ways]
    assert (total[1:] < total[0] / 2).all()


def test_compensation_stays_on_the_grid():
    """Each weight is one of the integers' values, ends included."""
    matrix, hessian, grid = drawn(1, 4, 9)
    steps = _compensated(matrix, hessian, grid) / grid.scale
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-9)
    assert np.abs(steps).max() <= 7 + 1e-9


def test_products_count_samples_alike_and_drop_chance():
    """A loud sample counts as much as a quiet one; what all samples share stays off the diagonal, chance does not."""
    share = np.array([[[2.0, 1.0], [1.0, 2.0]]])
    total = None
    for loud in (1.0, 1e6, 3.0):
        total = added(total, share * loud)
    expected = 3 * share / 4
    expected[0, [0, 1], [0, 1]] *= 1 + UNSEEN
    np.testing.assert_allclose(shrunk(total), expected)
    for sign in (-1, 1, -1):
        total = added(total, share * [[1, sign], [sign, 1]])
    assert abs(shrunk(total)[0, 0, 1]) < total.total[0, 0, 1]
    assert not shrunk(added(None, share))[0, 0, 1]
    assert added(total, share * np.nan) is total


def test_rounding_helps_samples_that_were_not_looked_at():
    """With fewer rows than inputs, one sample loud, both leave less error on others than rounding to the nearest."""
    better = np.zeros(2)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        mix = rng.normal(size=(6, 24))
        rows = [(rng.normal(size=(3, 6)) @ mix + 0.3 * rng.normal(size=(3, 24))) * loud for loud in (1, 1, 1, 1, 30, 1)]
        total = None
        for one in rows[:5]:
            total = added(total, (one.T @ one)[None])
        matrix = rng.normal(size=(8, 24))
        scale = np.broadcast_to(np.abs(matrix).max(1, keepdims=True) / 7, matrix.shape)
        grid = Grid(scale=scale, zero=np.zeros(matrix.shape), low=-7, high=7)
        nearest, *others = (
            grid.nearest(matrix),
            *(make(matrix, shrunk(total)[0], grid) for make in (_compensated, _adapted)),
        )
        fresh = rng.normal(size=(200, 6)) @ mix + 0.3 * rng.normal(size=(200, 24))
        costs = [np.square(fresh @ (one - matrix).T).sum() for one in (nearest, *others)]
        better += [costs[1] < costs[0], costs[2] < costs[0]]
    assert (better >= 9).all()
