"""Rounding of few bits: matrices against the real convolutions, and errors that never grow."""

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphquant as gq
from graphquant.formats import create_runner
from graphquant.formats.onnx import load
from graphquant.numerics import dequantize, quantize
from graphquant.optimize import weight_rounding
from graphquant.optimize.algorithm import AlgorithmData, WeightEdits
from graphquant.optimize.weight_rounding import (
    UNSEEN_POWER_SHARE,
    InputMoments,
    RoundingGrid,
    add_gram_product,
    correct_for_drift,
    matrix_form,
    matrix_input_rows,
    round_low_bit_weights,
    round_matrix_adaround,
    round_matrix_gptq,
    shrink_gram_matrix,
)
from graphquant.quantize import solve_scales

RNG = np.random.default_rng(5)
CONVS = {
    "plain": ((4, 3, 3, 3), {"pads": [1, 0, 1, 2]}),
    "strides": ((4, 3, 3, 2), {"strides": [2, 1], "dilations": [1, 2]}),
    "grouped": ((6, 2, 3, 3), {"group": 2}),
    "depthwise": ((8, 1, 3, 3), {"group": 4, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "same lower": ((4, 3, 2, 2), {"auto_pad": "SAME_LOWER"}),
    "one axis": ((5, 3, 4), {"pads": [1, 1]}),
}


def squared_output_errors(errors: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """Return the squared error of each output, (outputs,)."""
    return np.einsum("oi,oi->o", errors @ hessian, errors)


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
    costs = [squared_output_errors(entry - matrix, hessian) for entry in (rounded, grid.nearest(matrix))]
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
        total += [squared_output_errors(entry - matrix, hessian).sum() for entry in candidates]
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


def test_batches_of_inputs_change_nothing(monkeypatch):
    """GPTQ with 7 inputs a batch equals GPTQ with all in one, and starts with the input of the most power."""
    matrix, hessian, grid = drawn(3, 6, 40)
    whole = round_matrix_gptq(matrix, hessian, grid)
    monkeypatch.setattr(weight_rounding, "GPTQ_BATCH", 7)
    np.testing.assert_allclose(round_matrix_gptq(matrix, hessian, grid), whole, atol=1e-12)
    loudest = int(np.argmax(np.diagonal(hessian)))
    np.testing.assert_allclose(whole[:, loudest], grid.nearest(matrix)[:, loudest])


def test_drift_is_corrected():
    """Weights for inputs that lost a part leave a smaller error against the outputs of the float inputs."""
    rng = np.random.default_rng(2)
    rows, matrix = rng.normal(size=(300, 12)), rng.normal(size=(1, 5, 12))
    drifted = rows * 0.8 + 0.05 * rng.normal(size=rows.shape)
    gram = (drifted.T @ drifted)[None]
    moments = InputMoments(gram, (rows.T @ drifted)[None] - gram)
    errors = [
        np.square(rows @ matrix[0].T - drifted @ weights[0].T).sum()
        for weights in (matrix, correct_for_drift(matrix, moments))
    ]
    assert errors[1] < errors[0] * 0.5
    assert correct_for_drift(matrix, InputMoments(gram, None)) is matrix


def test_later_ops_are_rounded_behind_earlier_ones(tmp_path):
    """The second product is rounded for the outputs of the rounded first one, on a grid with zero points in blocks."""
    rng = np.random.default_rng(4)
    weights = {name: rng.normal(size=(64, 64)).astype(np.float32) for name in ("w1", "w2")}
    message = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n,64] x) => (float[n,64] y)'
        " { a = MatMul(x, w1) b = Relu(a) y = MatMul(b, w2) }"
    )
    message.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in weights.items())
    onnx.save(message, tmp_path / "m.onnx")
    model, x = load(tmp_path / "m.onnx"), rng.normal(size=(50, 64)).astype(np.float32)
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[scheme.block]\ndtype = "uint4"\nzero = "asymmetric"\nper = "block"\nblock_size = 32\nobserve = "mse"\n'
        '[[rule]]\nname = "w"\nwhy = "test"\nproducer = { kind = "parameter" }\n'
        'consumer = { kind = "matmul", input = "weight" }\nquantize = "block"\n'
    )
    plan = gq.plan(model, rules=[str(rules)])
    solution = solve_scales(model, plan, {})
    samples = AlgorithmData(feeds=[{"x": x}], validation_feeds=[], create_runner=create_runner)
    seen = []

    def record(matrix, hessian, grid):
        seen.append((matrix, np.diagonal(hessian), grid.nearest(matrix)))
        return grid.nearest(matrix)

    edits = WeightEdits(prepared_model=model, model=model, solution=solution)
    edited = round_low_bit_weights(edits, samples, "gptq", record)
    hidden = np.maximum(x @ seen[0][2].T, 0)
    powers = np.square(hidden).sum(0)
    np.testing.assert_allclose(seen[1][1], powers / powers.sum() * (1 + UNSEEN_POWER_SHARE), rtol=1e-3)
    np.testing.assert_array_equal(seen[0][0], weights["w1"].T)
    assert 0 < np.abs(seen[1][0] - weights["w2"].T).max() < 1
    for use, value in edited.edited_weights.items():
        params = solution.params[next(i for i, site in enumerate(solution.plan.sites) if use in site.uses)]
        np.testing.assert_allclose(dequantize(quantize(value, params), params), value, atol=1e-6)
        assert params.zero_point.min() < 8 < params.zero_point.max()
