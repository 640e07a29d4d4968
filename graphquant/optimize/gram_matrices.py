"""Weights as matrices, and what multiplies them: for each op the products of its inputs with each other, X^T X."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.ir import Model, Op, TensorRef
    from graphquant.numerics import Array
    from graphquant.optimize.algorithm import AlgorithmData


MAX_GRAM_ROWS: Final = 1024
"""Positions of a feature map that are looked at, from all over it."""

MAX_GRAM_INPUTS: Final = 4096
"""Inputs that are summed over; the products of more take more memory than they are worth."""

UNSEEN_POWER_SHARE: Final = 0.3
"""Of the power of each input, what is taken to go its own way in samples that were not looked at."""

MATRIX_OP_TYPES: Final = frozenset({"Conv", "Conv2D", "DepthwiseConv2dNative", "Gemm", "MatMul"})
"""Types of which it is known how they multiply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixForm:
    """How a weight is the matrices (groups, outputs, inputs).

    Attributes:
        order: The axes in the order output, input, kernel, or, of TensorFlow's depthwise kernels, channel, multiplier,
            kernel.
        groups: How many groups there are.
        kernel: The sizes of the kernel, () for a product.
    """

    order: tuple[int, ...]
    groups: int
    kernel: tuple[int, ...]

    def to_matrices(self, weight: Array) -> Array:
        """`weight` as (groups, outputs, inputs)."""
        transposed = weight.transpose(self.order)
        if self.kernel and self.groups > 1 and self.order[0] == len(self.order) - 2:  # channel, multiplier
            return transposed.reshape(self.groups, transposed.shape[1], -1)
        return transposed.reshape(self.groups, transposed.shape[0] // self.groups, -1)

    def from_matrices(self, matrices: Array, shape: Sequence[int]) -> Array:
        """The weight of `shape` of which `to_matrices` makes `matrices`."""
        transposed = matrices.reshape([shape[axis] for axis in self.order])
        return np.ascontiguousarray(transposed.transpose(np.argsort(self.order)))


def matrix_form(op: Op, shape: Sequence[int]) -> MatrixForm | None:
    """How the weight of `op`, of this shape, is matrices; None if that is not known."""
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


def measure_gram_matrices(
    model: Model, inputs: Sequence[tuple[TensorRef, Op, MatrixForm]], samples: AlgorithmData
) -> list[Array | None]:
    """X^T X for each op, float64 (groups, inputs, inputs), off its diagonal less what chance explains; see `shrink_gram_matrix`.

    None where no sample reaches an op, or its rows do not fit.

    Raises:
        ModelError: The model cannot be run.
    """
    runner = samples.create_runner(model)
    refused = runner.unobservable([tensor for tensor, _, _ in inputs])
    observable = list(dict.fromkeys(tensor for tensor, _, _ in inputs if tensor not in refused))
    sums: list[GramSum | None] = [None] * len(inputs)
    for values_by_tensor in runner.observe(observable, samples.feeds) if observable else ():
        for position, (tensor, op, form) in enumerate(inputs):
            total: Array | None = None
            for value in values_by_tensor.get(tensor, ()):
                rows = matrix_input_rows(op, form, np.asarray(value, np.float32))
                if rows is not None:
                    product = np.matmul(rows.transpose(0, 2, 1), rows).astype(np.float64)
                    total = product if total is None else total + product
            if total is not None:
                sums[position] = add_gram_product(sums[position], total)
    return [None if gram_sum is None else shrink_gram_matrix(gram_sum) for gram_sum in sums]


@dataclass(frozen=True, slots=True)
class GramSum:
    """Products of rows, each sample's divided by its power, summed over samples.

    Attributes:
        total: float64 (groups, inputs, inputs).
        power: The squares of what is off the diagonal, summed over the samples' own products.
        count: How many samples there are.
    """

    total: Array
    power: float
    count: int


def add_gram_product(previous: GramSum | None, product: Array) -> GramSum | None:
    """The sum with one more sample's product, as if the sample were as loud as all others.

    Else it is the loudest few that decide how weights are rounded, and other loud ones lose. One with NaN or infinite
    values says nothing.
    """
    trace = float(np.einsum("gii->", product))
    if not np.isfinite(trace):
        return previous
    normalized = product / trace if trace else product
    power = _off_diagonal_power(normalized)
    if previous is None:
        return GramSum(normalized, power, 1)
    return GramSum(previous.total + normalized, previous.power + power, previous.count + 1)


def shrink_gram_matrix(gram_sum: GramSum) -> Array:
    """The summed products, drawn towards their diagonal by the share of what is off it that chance explains.

    Of fewer rows than inputs the products know directions without any error, and rounding would put all of its errors
    there. Samples tell how far chance moves the products: rows of one sample are alike.

    Source: Schäfer and Strimmer 2005, "A Shrinkage Approach to Large-Scale Covariance Matrix Estimation", with the
    target that they call D; one share for all groups. The diagonal is raised by `UNSEEN_POWER_SHARE` beside.
    """
    off_diagonal = _off_diagonal_power(gram_sum.total)
    share = 0.0
    if gram_sum.count > 1 and off_diagonal:
        chance_power = (gram_sum.power - off_diagonal / gram_sum.count) * gram_sum.count / (gram_sum.count - 1)
        share = max(1 - chance_power / off_diagonal, 0.0)
    index = np.arange(gram_sum.total.shape[-1])
    shrunk = gram_sum.total * share
    shrunk[:, index, index] = gram_sum.total[:, index, index] * (1 + UNSEEN_POWER_SHARE)
    return shrunk


def _off_diagonal_power(product: Array) -> float:
    """The sum of the squares off the diagonals."""
    diagonals = np.diagonal(product, axis1=1, axis2=2)
    return float(np.square(product).sum() - np.square(diagonals).sum())


def matrix_input_rows(op: Op, form: MatrixForm, value: Array) -> Array | None:
    """What the matrices multiply, float32 (groups, rows, inputs): some of all positions."""
    if not form.kernel:
        transposed = op.numeric_attr("transA", 0) or op.numeric_attr("transpose_a", 0)
        rows = (value.T if transposed else value).reshape(-1, value.shape[0] if transposed else value.shape[-1])
        return rows[:: max(len(rows) // MAX_GRAM_ROWS, 1)][None]
    if value.ndim != len(form.kernel) + 2:
        return None
    data_format = op.attrs.get("data_format", b"NHWC" if op.type != "Conv" else b"NCHW")
    text = data_format.decode() if isinstance(data_format, bytes) else str(data_format)
    channels_first = text.startswith("NC")
    if not channels_first:
        value = np.moveaxis(value, -1, 1)
    strides, dilations, pads = _window_geometry(op, form.kernel, value.shape[2:], channels_first=channels_first)
    padded = np.pad(value, [(0, 0), (0, 0), *pads])
    window_sizes = [(size - 1) * dilation + 1 for size, dilation in zip(form.kernel, dilations, strict=True)]
    axes = tuple(range(2, value.ndim))
    windows = np.lib.stride_tricks.sliding_window_view(padded, window_sizes, axis=axes)
    everything = slice(None)
    outer: list[slice] = [everything, everything, *(slice(None, None, stride) for stride in strides)]
    inner = [slice(None, None, dilation) for dilation in dilations]
    windows = windows[tuple(outer + inner)]
    return _sample_window_rows(windows, form)


def _sample_window_rows(windows: Array, form: MatrixForm) -> Array:
    """Windows (samples, channels, positions..., kernel...) as (groups, rows, inputs)."""
    positions = np.moveaxis(windows, 1, -1 - len(form.kernel))  # samples, positions, channels, kernel
    leading_shape = positions.shape[: 1 + len(form.kernel)]
    count = int(np.prod(leading_shape))
    chosen = np.unravel_index(np.arange(0, count, max(count // MAX_GRAM_ROWS, 1)), leading_shape)
    sampled = positions[chosen]
    rows = sampled.reshape(len(sampled), form.groups, -1)
    return np.ascontiguousarray(rows.transpose(1, 0, 2))


def _window_geometry(
    op: Op, kernel: Sequence[int], sizes: Sequence[int], *, channels_first: bool
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Strides, dilations and pads of a convolution."""
    spatial_rank = len(kernel)

    def spatial_attribute(name: str) -> list[int]:
        values = [int(value) for value in op.attrs.get(name, ()) or ()]
        if len(values) == spatial_rank + 2:
            return values[2:] if channels_first else values[1:-1]
        return values or [1] * spatial_rank

    strides, dilations = spatial_attribute("strides"), spatial_attribute("dilations")
    padding = op.attrs.get("auto_pad" if op.type == "Conv" else "padding", "")
    mode = padding.decode() if isinstance(padding, bytes) else str(padding)
    explicit_pads = [int(pad) for pad in op.attrs.get("pads", ()) or ()]
    if not mode.startswith("SAME"):
        pad_sizes = (
            explicit_pads if len(explicit_pads) == 2 * spatial_rank and mode != "VALID" else [0] * (2 * spatial_rank)
        )
        return strides, dilations, list(zip(pad_sizes[:spatial_rank], pad_sizes[spatial_rank:], strict=True))
    pads = []
    for size, window, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total_pad = max((-(-size // stride) - 1) * stride + (window - 1) * dilation + 1 - size, 0)
        smaller_pad, larger_pad = total_pad // 2, total_pad - total_pad // 2
        pads.append((larger_pad, smaller_pad) if mode == "SAME_LOWER" else (smaller_pad, larger_pad))
    return strides, dilations, pads
