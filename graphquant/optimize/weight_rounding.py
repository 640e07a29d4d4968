"""GPTQ and AdaRound: round low-bit weights so that the output error of their op is small.

The squared output error of an op is e H e^T for a row e of rounding errors, with the Gram matrix H = X^T X of its
inputs. Rounding to nearest minimizes only the diagonal part. With 4 bits, the rest is worth several decibels.

Sources: Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers".
Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization" (AdaRound). Its local objective
(equation 13) is minimized by coordinate descent from rounding to nearest, instead of gradients on a relaxation.
Coordinate descent needs no step size, terminates, and is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from graphquant.ir import Model, Op, Parameters, TensorRef, paused_gc
from graphquant.numerics import Array, IntType, QParams, broadcast_to_tensor
from graphquant.optimize.algorithm import AlgorithmData, AlgorithmResult, WeightEdits, skipped_target
from graphquant.optimize.weighted_ops import (
    NOT_OBSERVED,
    WeightedOp,
    dependency_levels,
    find_unshared_constant,
    find_weighted_ops,
)

if TYPE_CHECKING:
    from graphquant.ir import OpKey
    from graphquant.quantize import Plan

RoundMatrix = Callable[[Array, Array, "RoundingGrid"], Array]
RoundingTask = tuple[WeightedOp, TensorRef, Array, QParams, "MatrixForm"]  # op, its weight's constant, value and form

GPTQ: Final = "gptq"
ADAROUND: Final = "adaround"

GPTQ_DAMPING: Final = 0.01  # share of the mean of H's diagonal that GPTQ adds to the diagonal, as in the paper
GPTQ_BATCH: Final = 128  # number of inputs whose errors reach the later ones together
MAX_SWEEPS: Final = 8  # maximum number of passes of AdaRound over all weights
MAX_ROUNDED_BITS: Final = 8  # bit width above which rounding to nearest is exact enough
MAX_GRAM_ROWS: Final = 1024  # maximum number of positions of a feature map, spread over all of it
MAX_GRAM_INPUTS: Final = 4096
"""Maximum number of inputs of a sum. Larger Gram matrices need more memory than they gain."""

DRIFT_SHARE: Final = 0.5
"""Share of the correction for inputs that differ from those of the float model. The full one fits few samples."""

MAX_WAVES: Final = 32
"""Maximum number of passes over the samples. Each measures the inputs of ops behind the weights rounded so far."""

UNSEEN_POWER_SHARE: Final = 0.3
"""Share of each input's power that is assumed to be independent in samples outside of the measured ones."""

MATRIX_OP_TYPES: Final = frozenset({"Conv", "Conv2D", "DepthwiseConv2dNative", "Gemm", "MatMul"})
"""Op types with a known matrix form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingGrid:
    """Integer grid of a weight."""

    scale: Array  # float64, of the weight's shape, real units per step
    zero: Array  # float64, likewise, steps
    low: int  # smallest integer
    high: int  # largest integer

    def nearest(self, weight: Array) -> Array:
        """Round to the nearest grid value."""
        steps = np.clip(np.rint(weight / self.scale + self.zero), self.low, self.high)
        return np.asarray((steps - self.zero) * self.scale)

    def select(self, index: tuple[slice | int, ...]) -> RoundingGrid:
        """Return the grid of a part of the weight."""
        return replace(self, scale=self.scale[index], zero=self.zero[index])


@paused_gc()
def apply_gptq(edits: WeightEdits, samples: AlgorithmData) -> WeightEdits:
    """Round low-bit weights by GPTQ. The float function changes: weights become the values of their integers."""
    return round_low_bit_weights(edits, samples, GPTQ, round_matrix_gptq)


def round_matrix_gptq(matrix: Array, hessian: Array, grid: RoundingGrid) -> Array:
    """Round the matrix (outputs, inputs) of one group, input by input, from the one with the most power to the least.

    Errors reach the inputs of later batches by one product for each batch, as in the paper.
    """
    count = len(hessian)
    order = np.argsort(-np.diagonal(hessian), kind="stable")
    # Columns are contiguous, since they are read one by one.
    grid = replace(grid, scale=np.asfortranarray(grid.scale[:, order]), zero=np.asfortranarray(grid.zero[:, order]))
    remaining = np.asfortranarray(matrix[:, order])
    rounded = np.empty_like(remaining)
    mean = float(np.trace(hessian)) / max(count, 1) or 1.0
    damped = hessian[np.ix_(order, order)] + np.eye(count) * (GPTQ_DAMPING * mean)
    inverse = np.linalg.cholesky(np.linalg.inv(damped)).T
    for start in range(0, count, GPTQ_BATCH):
        stop = min(start + GPTQ_BATCH, count)
        errors = np.empty((len(matrix), stop - start))
        for column in range(start, stop):
            rounded[:, column] = grid.select((slice(None), column)).nearest(remaining[:, column])
            error = (remaining[:, column] - rounded[:, column]) / inverse[column, column]
            remaining[:, column + 1 : stop] -= np.outer(error, inverse[column, column + 1 : stop])
            errors[:, column - start] = error
        remaining[:, stop:] -= errors @ inverse[start:stop, stop:]
    return rounded[:, np.argsort(order)]


@paused_gc()
def apply_adaround(edits: WeightEdits, samples: AlgorithmData) -> WeightEdits:
    """Round low-bit weights by AdaRound. The float function changes: weights become the values of their integers."""
    return round_low_bit_weights(edits, samples, ADAROUND, round_matrix_adaround)


def round_matrix_adaround(matrix: Array, hessian: Array, grid: RoundingGrid) -> Array:
    """Round the matrix (outputs, inputs) of one group to one of the two adjacent steps per weight."""
    steps = matrix / grid.scale + grid.zero
    floors = np.clip(np.floor(steps), grid.low, grid.high)
    ceilings = np.clip(np.floor(steps) + 1, grid.low, grid.high)
    below, above = ((grid_steps - grid.zero) * grid.scale for grid_steps in (floors, ceilings))
    result = grid.nearest(matrix)
    slope = (result - matrix) @ hessian
    for _ in range(MAX_SWEEPS):
        has_changed = False
        for column in range(len(hessian)):
            current = result[:, column]
            opposite = np.where(current == below[:, column], above[:, column], below[:, column])
            change = opposite - current
            better = 2 * change * slope[:, column] + change * change * hessian[column, column] < 0
            if better.any():
                change = np.where(better, change, 0.0)
                result[:, column] = np.where(better, opposite, current)
                slope += np.outer(change, hessian[column])
                has_changed = True
        if not has_changed:
            break
    return result


class MatrixForm(NamedTuple):
    """Axis order that turns a weight into matrices (groups, outputs, inputs)."""

    # Axes in the order output, input, kernel; for TensorFlow's depthwise kernels channel, multiplier, kernel.
    order: tuple[int, ...]
    groups: int  # number of groups
    kernel: tuple[int, ...]  # kernel sizes; () for a matrix product

    def to_matrices(self, weight: Array) -> Array:
        """Convert `weight` to (groups, outputs, inputs)."""
        return weight.transpose(self.order).reshape(self.matrix_shape(weight.shape))

    def matrix_shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return (groups, outputs, inputs) for a weight of `shape`."""
        first, second = (shape[axis] for axis in self.order[:2])
        is_depthwise = self.kernel and self.groups > 1 and self.order[0] == len(self.order) - 2  # channel, multiplier
        outputs = second if is_depthwise else first // self.groups
        return self.groups, outputs, math.prod(shape) // max(self.groups * outputs, 1)

    def from_matrices(self, matrices: Array, shape: Sequence[int]) -> Array:
        """Convert `matrices` back to a weight of `shape`."""
        transposed = matrices.reshape([shape[axis] for axis in self.order])
        return np.ascontiguousarray(transposed.transpose(np.argsort(self.order)))


def matrix_form(op: Op, shape: Sequence[int]) -> MatrixForm | None:
    """Matrix form of the weight of `op`; None if unknown."""
    rank = len(shape)
    if op.type not in MATRIX_OP_TYPES or (not op.kind.endswith("conv") and rank != len(("inputs", "outputs"))):
        return None
    if op.type == "DepthwiseConv2dNative":
        return MatrixForm(order=(2, 3, 0, 1), groups=shape[2], kernel=tuple(shape[:2]))
    if op.type == "Conv2D":
        return MatrixForm(order=(3, 2, 0, 1), groups=1, kernel=tuple(shape[:2]))
    if op.type == "Conv":
        groups = int(op.numeric_attr("group", 1))
        fits = rank > len(("output", "input")) and groups > 0 and shape[0] % groups == 0
        return MatrixForm(order=tuple(range(rank)), groups=groups, kernel=tuple(shape[2:])) if fits else None
    transposed = bool(op.numeric_attr("transB", 0) or op.numeric_attr("transpose_b", 0))
    return MatrixForm(order=(0, 1) if transposed else (1, 0), groups=1, kernel=())


class InputMoments(NamedTuple):
    """Moments of the inputs of an op behind rounded weights, X, with those of the float model, Y."""

    gram: Array  # X^T X, float64 (groups, inputs, inputs); see `shrink_gram_matrix`
    drift: Array | None  # Y^T X - X^T X, normalized as `gram`; None if X = Y


def measure_input_moments(
    model: Model,
    inputs: Sequence[tuple[TensorRef, Op, MatrixForm]],
    samples: AlgorithmData,
    float_model: Model | None = None,
) -> list[InputMoments | None]:
    """Measure the moments of the inputs of each op in `model`, and how they differ from those in `float_model`.

    The value is None if no sample reaches the op or its rows do not fit. Raises a ModelError if a model cannot be run.
    """
    sums: list[GramSum | None] = [None] * len(inputs)
    drifts: list[Array | None] = [None] * len(inputs)
    tensors = [tensor for tensor, _, _ in inputs]
    models = [model] if float_model is None else [model, float_model]
    for values_by_model in zip(*(samples.observe(m, tensors, ancestors_only=True) for m in models), strict=True):
        for position, (tensor, op, form) in enumerate(inputs):
            rows, *float_rows = (
                [matrix_input_rows(op, form, np.asarray(value, np.float32)) for value in values.get(tensor, ())]
                for values in values_by_model
            )
            if (product := _sum_products(rows, rows)) is None:
                continue
            sums[position] = add_gram_product(sums[position], product)
            cross_product = _sum_products(float_rows[0], rows) if float_rows and not form.kernel else None
            trace = float(np.einsum("gii->", product))
            if cross_product is not None and trace and np.isfinite(trace) and np.isfinite(cross_product).all():
                drift = (cross_product - product) / trace
                previous = drifts[position]
                drifts[position] = drift if previous is None else previous + drift
    return [
        None if gram_sum is None else InputMoments(shrink_gram_matrix(gram_sum), drift)
        for gram_sum, drift in zip(sums, drifts, strict=True)
    ]


def _sum_products(first: Sequence[Array | None], second: Sequence[Array | None]) -> Array | None:
    """Sum A^T B over pairs of rows, float64 (groups, inputs, inputs); None without pairs, or if their shapes differ."""
    total: Array | None = None
    if len(first) != len(second):
        return None
    for rows, paired_rows in zip(first, second, strict=True):
        if rows is not None and paired_rows is not None and rows.shape == paired_rows.shape:
            product = np.matmul(rows.transpose(0, 2, 1), paired_rows).astype(np.float64)
            total = product if total is None else total + product
    return total


def correct_for_drift(matrices: Array, moments: InputMoments) -> Array:
    """Return weights (groups, outputs, inputs) whose outputs for drifted inputs are nearer those of the float model.

    The full correction W (Y^T X - X^T X) (X^T X)^-1 minimizes the error on the measured samples.

    Source: Arai and Ichikawa 2025, "Quantization Error Propagation: Revisiting Layer-Wise Post-Training Quantization",
        proposition 5.1, with its share of the correction.
    """
    if moments.drift is None:
        return matrices
    count = moments.gram.shape[-1]
    damping = np.eye(count) * (GPTQ_DAMPING * np.einsum("gii->g", moments.gram)[:, None, None] / max(count, 1))
    correction = np.linalg.solve(moments.gram + damping, moments.drift.transpose(0, 2, 1)).transpose(0, 2, 1)
    return np.asarray(matrices + DRIFT_SHARE * (matrices @ correction))


class GramSum(NamedTuple):
    """Sum of the samples' Gram matrices, each divided by the power of its sample."""

    total: Array  # float64 (groups, inputs, inputs)
    power: float  # sum over the samples of the squared off-diagonal entries
    samples: int  # number of samples


def add_gram_product(previous: GramSum | None, product: Array) -> GramSum | None:
    """Add the Gram matrix of one sample with the same weight as all others.

    Otherwise the few loudest samples would decide how weights are rounded, at the expense of all other samples. A
    sample with NaN or infinite values is ignored.
    """
    trace = float(np.einsum("gii->", product))
    if not np.isfinite(trace):
        return previous
    normalized = product / trace if trace else product
    power = _off_diagonal_power(normalized)
    if previous is None:
        return GramSum(normalized, power, 1)
    return GramSum(previous.total + normalized, previous.power + power, previous.samples + 1)


def shrink_gram_matrix(gram_sum: GramSum) -> Array:
    """Shrink the off-diagonal entries towards 0 by the share that chance explains.

    With fewer rows than inputs, a Gram matrix has directions of zero error, and rounding would move all its errors
    there. The variance is estimated from samples, because rows of one sample are similar.

    Source: Schäfer and Strimmer 2005, "A Shrinkage Approach to Large-Scale Covariance Matrix Estimation", target D,
        with one share for all groups. In addition, the diagonal grows by `UNSEEN_POWER_SHARE`.
    """
    off_diagonal = _off_diagonal_power(gram_sum.total)
    share = 0.0
    if gram_sum.samples > 1 and off_diagonal:
        chance_power = (gram_sum.power - off_diagonal / gram_sum.samples) * gram_sum.samples / (gram_sum.samples - 1)
        share = max(1 - chance_power / off_diagonal, 0.0)
    index = np.arange(gram_sum.total.shape[-1])
    shrunk = gram_sum.total * share
    shrunk[:, index, index] = gram_sum.total[:, index, index] * (1 + UNSEEN_POWER_SHARE)
    return shrunk


def _off_diagonal_power(product: Array) -> float:
    """Sum of the squared off-diagonal entries."""
    diagonals = np.diagonal(product, axis1=1, axis2=2)
    return float(np.square(product).sum() - np.square(diagonals).sum())


def matrix_input_rows(op: Op, form: MatrixForm, value: Array) -> Array | None:
    """Inputs of the matrices, float32 (groups, rows, inputs), at a sample of the positions."""
    if not form.kernel:
        transposed = op.numeric_attr("transA", 0) or op.numeric_attr("transpose_a", 0)
        rows = (value.T if transposed else value).reshape(-1, value.shape[0] if transposed else value.shape[-1])
        return rows[:: max(len(rows) // MAX_GRAM_ROWS, 1)][None]
    if value.ndim != len(form.kernel) + 2:
        return None
    channels_first = op.text_attr("data_format", "NCHW" if op.type == "Conv" else "NHWC").startswith("NC")
    if not channels_first:
        value = np.moveaxis(value, -1, 1)
    strides, dilations, pads = _window_geometry(op, form.kernel, value.shape[2:], channels_first=channels_first)
    padded = np.pad(value, [(0, 0), (0, 0), *pads])
    window_sizes = [(size - 1) * dilation + 1 for size, dilation in zip(form.kernel, dilations, strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(padded, window_sizes, axis=tuple(range(2, value.ndim)))
    steps = (1, 1, *strides, *dilations)
    windows = windows[tuple(slice(None, None, step) for step in steps)]
    positions = np.moveaxis(windows, 1, -1 - len(form.kernel))  # samples, positions, channels, kernel
    leading_shape = positions.shape[: 1 + len(form.kernel)]
    count = int(np.prod(leading_shape))
    chosen = np.unravel_index(np.arange(0, count, max(count // MAX_GRAM_ROWS, 1)), leading_shape)
    window_rows = positions[chosen].reshape(len(chosen[0]), form.groups, -1)
    return np.ascontiguousarray(window_rows.transpose(1, 0, 2))


def _window_geometry(
    op: Op, kernel: Sequence[int], sizes: Sequence[int], *, channels_first: bool
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Strides, dilations and padding of a convolution."""
    rank = len(kernel)

    def spatial_attribute(name: str) -> list[int]:
        values = [int(value) for value in op.attrs.get(name, ()) or ()]
        if len(values) == rank + 2:
            return values[2:] if channels_first else values[1:-1]
        return values or [1] * rank

    strides, dilations = spatial_attribute("strides"), spatial_attribute("dilations")
    mode = op.text_attr("auto_pad" if op.type == "Conv" else "padding", "")
    if not mode.startswith("SAME"):
        pad_sizes = [int(pad) for pad in op.attrs.get("pads", ()) or ()]
        if len(pad_sizes) != 2 * rank or mode == "VALID":
            pad_sizes = [0] * (2 * rank)
        return strides, dilations, list(zip(pad_sizes[:rank], pad_sizes[rank:], strict=True))
    pads = []
    for size, window, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total_pad = max((-(-size // stride) - 1) * stride + (window - 1) * dilation + 1 - size, 0)
        smaller_pad, larger_pad = total_pad // 2, total_pad - total_pad // 2
        pads.append((larger_pad, smaller_pad) if mode == "SAME_LOWER" else (smaller_pad, larger_pad))
    return strides, dilations, pads


GRAM_MAC_SECONDS, GRAM_ENTRY_SECONDS = 1e-10, 1e-8  # of a multiply-add and an entry of a sample's Gram matrix
SWEEP_ENTRY_SECONDS, COLUMN_SECONDS = 4e-9, 4e-5  # of an entry of a sweep's outer products, and of each column


def predict_rounding_work(model: Model, plan: Plan, samples: int, macs: Mapping[OpKey, int], name: str) -> float:
    """Predict the nominal seconds of GPTQ or AdaRound for a plan, fitted to `samples`.

    Gram matrices grow with the square of the inputs of a sum, and the sweeps over them with its outputs too. `macs` are
    the multiply-adds of each op, which give its positions.
    """
    sweeps = MAX_SWEEPS if name == ADAROUND else 1
    # Each wave runs the float and the rounded model, on average half of their ops.
    waves = min(sum(site.parameter for site in plan.sites), MAX_WAVES)
    work = waves * samples * sum(macs.values()) * GRAM_MAC_SECONDS
    for site in plan.sites:
        for use in site.uses if site.parameter else ():
            op, shape = model.graphs[use.graph].op(use.op), model.output(site.tensor).shape
            sizes = [dim or 1 for dim in shape or ()]
            form = matrix_form(op, sizes) if sizes else None
            if form is None or getattr(site.scheme.type, "bits", 0) > MAX_ROUNDED_BITS:
                continue
            weights = math.prod(sizes)
            groups, _, inputs = form.matrix_shape(sizes)
            if inputs > MAX_GRAM_INPUTS:
                continue
            rows = min(macs.get((use.graph, use.op), 0) / weights, 2 * MAX_GRAM_ROWS)
            entries = groups * inputs * inputs
            work += samples * entries * (rows * GRAM_MAC_SECONDS + GRAM_ENTRY_SECONDS)
            work += sweeps * (weights * inputs * SWEEP_ENTRY_SECONDS + groups * inputs * COLUMN_SECONDS)
    return work


def round_low_bit_weights(
    edits: WeightEdits, samples: AlgorithmData, name: str, round_matrix: RoundMatrix
) -> WeightEdits:
    """Replace low-bit weights by the result of `round_matrix` for matrix, H and grid.

    H is measured behind the weights rounded so far, as in both papers. Matrix products also correct a part of the
    errors that these weights cause. Convolutions lose by that on samples which were not measured.
    """
    model, prepared, solution = edits.model.copy(), edits.prepared_model, edits.solution
    parameters = Parameters(prepared)
    index_by_use = {use: index for index, site in enumerate(solution.plan.sites) for use in site.uses}
    results: list[AlgorithmResult] = []
    tasks: list[RoundingTask] = []
    for weighted in find_weighted_ops(prepared, solution):
        index = index_by_use[weighted.weight]
        params = solution.params.get(index)
        if solution.plan.sites[index].view is not None or not isinstance(params, QParams):
            continue
        if not isinstance(params.type, IntType) or params.type.bits > MAX_ROUNDED_BITS:
            continue
        tensor = prepared.graphs[weighted.graph].source_of(weighted.weight)
        value = None if tensor is None else parameters.value(tensor)
        constant = None if value is None else find_unshared_constant(edits.model, weighted.weight, value.shape)
        form = None if value is None else matrix_form(weighted.op, value.shape)
        if value is None or constant is None:
            results.append(skipped_target(name, weighted.name, "its weight is a variable, or other ops read it too"))
        elif form is None or form.to_matrices(value).shape[-1] > MAX_GRAM_INPUTS:
            results.append(skipped_target(name, weighted.name, f"a {weighted.op.type} of this form has no matrix form"))
        else:
            tasks.append((weighted, constant, value, params, form))
    weights = dict(edits.edited_weights)
    waves = _dependency_waves(prepared, tasks)
    for wave in waves:
        model = model.copy()  # the runners of earlier waves keep their model
        inputs = [
            (prepared.graphs[weighted.graph].source_of(weighted.data_input) or weighted.output, weighted.op, form)
            for weighted, *_, form in wave
        ]
        has_drift = wave is not waves[0] and any(not form.kernel for *_, form in wave)
        moments_by_op = measure_input_moments(model, inputs, samples, prepared if has_drift else None)
        for (weighted, constant, value, params, form), moments in zip(wave, moments_by_op, strict=True):
            if moments is None:
                results.append(skipped_target(name, weighted.name, NOT_OBSERVED))
                continue
            rounded_value, gain = _round_if_better(value, params, form, moments, round_matrix)
            graph = model.graphs[constant.graph]
            graph.replace_op(replace(graph.op(constant.op), read_value=partial(np.asarray, rounded_value)))
            weights[weighted.weight] = rounded_value
            detail = f"its squared error is {gain:.0%} of that of nearest rounding"
            results.append(AlgorithmResult(algorithm=name, target=weighted.name, detail=detail))
    return replace(edits, model=model, edited_weights=weights, results=(*edits.results, *results))


def _dependency_waves(model: Model, tasks: Sequence[RoundingTask]) -> list[list[RoundingTask]]:
    """Divide tasks into at most `MAX_WAVES`, each of which depends on the ones before; one wave for graphs with loops.

    Ops in the body of a loop or branch count by their depth in the body.
    """
    level_by_op: dict[tuple[str, str], int] = {}
    for graph_name in dict.fromkeys(task[0].graph for task in tasks):
        names = [weighted.op.name for weighted, *_ in tasks if weighted.graph == graph_name]
        levels = dependency_levels(model.graphs[graph_name], names)
        level_by_op |= {(graph_name, op): level for op, level in levels.items()}
    depth = max(level_by_op.values(), default=0) + 1
    waves: dict[int, list[RoundingTask]] = {}
    for task in tasks:
        level = level_by_op.get((task[0].graph, task[0].op.name), 0)
        waves.setdefault(level * min(depth, MAX_WAVES) // depth, []).append(task)
    return [waves[number] for number in sorted(waves)]


def _round_if_better(
    value: Array, params: QParams, form: MatrixForm, moments: InputMoments, round_matrix: RoundMatrix
) -> tuple[Array, float]:
    """Return the rounded float32 weight, and its squared error relative to rounding to nearest.

    The error is that against the weight which `correct_for_drift` returns.
    """
    low, high = params.type.limits(narrow=params.narrow)
    expanded = (
        broadcast_to_tensor(values.astype(np.float64), params, value.shape)
        for values in (params.scale, params.zero_point)
    )
    scale, zero = (form.to_matrices(np.broadcast_to(values, value.shape)) for values in expanded)
    grid = RoundingGrid(scale=scale, zero=zero, low=int(low), high=int(high))
    original = form.to_matrices(value.astype(np.float64))
    matrices, result = correct_for_drift(original, moments), grid.nearest(original)
    before = after = 0.0
    for group, hessian in enumerate(moments.gram):
        matrix, group_grid = matrices[group], grid.select((group,))
        nearest = result[group]
        alternative = round_matrix(matrix, hessian, group_grid)
        errors = [candidate - matrix for candidate in (nearest, alternative)]
        costs = [np.einsum("oi,oi->o", error @ hessian, error) for error in errors]  # squared, of each output
        better = costs[1] < costs[0]
        result[group] = np.where(better[:, None], alternative, nearest)
        before += float(costs[0].sum())
        after += float(np.minimum(*costs).sum())
    return form.from_matrices(result, value.shape).astype(np.float32), after / before if before else 1.0
