"""Rounding of few bits: matrices against the real convolutions, and errors that never grow."""

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphquant.formats.onnx import load
from graphquant.optimize.weight_rounding import (
    UNSEEN_POWER_SHARE,
    RoundingGrid,
    _squared_output_errors,
    add_gram_product,
    matrix_form,
    matrix_input_rows,
    round_matrix_adaround,
    round_matrix_gptq,
    shrink_gram_matrix,
)

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
    form = matrix_form(op, shape)
    rows, matrices = matrix_input_rows(op, form, x), form.to_matrices(weight)
    product = np.concatenate(list(rows @ matrices.transpose(0, 2, 1)), axis=-1)
    np.testing.assert_allclose(product, expected, rtol=1e-4, atol=1e-5)
    assert np.array_equal(form.from_matrices(matrices, shape), weight)


def drawn(seed, outputs, inputs):
    """A matrix, H of correlated rows, and a grid of 4 bits."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(outputs, inputs))
    rows = rng.normal(size=(40, inputs)) @ rng.normal(size=(inputs, inputs)) + 1
    scale = np.broadcast_to(np.abs(matrix).max(1, keepdims=True) / 7, matrix.shape)
    return matrix, rows.T @ rows, RoundingGrid(scale=scale, zero=np.zeros(matrix.shape), low=-7, high=7)


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 12))
@settings(max_examples=60)
def test_adaptive_rounding_never_costs(seed, outputs, inputs):
    """No output's error is larger than that of nearest rounding, and each weight is at a step beside it."""
    matrix, hessian, grid = drawn(seed, outputs, inputs)
    rounded = round_matrix_adaround(matrix, hessian, grid)
    costs = [_squared_output_errors(entry - matrix, hessian) for entry in (rounded, grid.nearest(matrix))]
    assert (costs[0] <= costs[1] * (1 + 1e-9) + 1e-12).all()
    steps = rounded / grid.scale
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-9)
    assert (np.abs(rounded - matrix) <= grid.scale * (1 + 1e-9)).all()
    assert np.array_equal(rounded, round_matrix_adaround(matrix, hessian, grid))


def test_both_halve_the_error_of_correlated_inputs():
    """Over 20 drawn matrices the squared errors are less than half of nearest rounding's."""
    total = np.zeros(3)
    for seed in range(20):
        matrix, hessian, grid = drawn(seed, 8, 24)
        candidates = (
            grid.nearest(matrix),
            round_matrix_gptq(matrix, hessian, grid),
            round_matrix_adaround(matrix, hessian, grid),
        )
        total += [_squared_output_errors(entry - matrix, hessian).sum() for entry in candidates]
    assert (total[1:] < total[0] / 2).all()


def test_compensation_stays_on_the_grid():
    """Each weight is one of the integers' values, ends included."""
    matrix, hessian, grid = drawn(1, 4, 9)
    steps = round_matrix_gptq(matrix, hessian, grid) / grid.scale
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-9)
    assert np.abs(steps).max() <= 7 + 1e-9


def test_products_count_samples_alike_and_drop_chance():
    """A loud sample counts as much as a quiet one; what all samples share stays off the diagonal, chance does not."""
    share = np.array([[[2.0, 1.0], [1.0, 2.0]]])
    total = None
    for loud in (1.0, 1e6, 3.0):
        total = add_gram_product(total, share * loud)
    expected = 3 * share / 4
    expected[0, [0, 1], [0, 1]] *= 1 + UNSEEN_POWER_SHARE
    np.testing.assert_allclose(shrink_gram_matrix(total), expected)
    for sign in (-1, 1, -1):
        total = add_gram_product(total, share * [[1, sign], [sign, 1]])
    assert abs(shrink_gram_matrix(total)[0, 0, 1]) < total.total[0, 0, 1]
    assert not shrink_gram_matrix(add_gram_product(None, share))[0, 0, 1]
    assert add_gram_product(total, share * np.nan) is total


def test_rounding_helps_samples_that_were_not_looked_at():
    """With fewer rows than inputs, one sample loud, both leave less error on others than rounding to the nearest."""
    better = np.zeros(2)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        mix = rng.normal(size=(6, 24))
        rows = [(rng.normal(size=(3, 6)) @ mix + 0.3 * rng.normal(size=(3, 24))) * loud for loud in (1, 1, 1, 1, 30, 1)]
        total = None
        for entry in rows[:5]:
            total = add_gram_product(total, (entry.T @ entry)[None])
        matrix = rng.normal(size=(8, 24))
        scale = np.broadcast_to(np.abs(matrix).max(1, keepdims=True) / 7, matrix.shape)
        grid = RoundingGrid(scale=scale, zero=np.zeros(matrix.shape), low=-7, high=7)
        nearest, *alternatives = (
            grid.nearest(matrix),
            *(make(matrix, shrink_gram_matrix(total)[0], grid) for make in (round_matrix_gptq, round_matrix_adaround)),
        )
        fresh = rng.normal(size=(200, 6)) @ mix + 0.3 * rng.normal(size=(200, 24))
        costs = [np.square(fresh @ (entry - matrix).T).sum() for entry in (nearest, *alternatives)]
        better += [costs[1] < costs[0], costs[2] < costs[0]]
    assert (better >= 9).all()
