"""Weights as matrices, and what multiplies them: for each op the products of its inputs with each other, X^T X."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.corrections.types import Samples
    from graphquant.ir import Model, Op, TensorRef
    from graphquant.numerics import Array

ROWS: Final = 1024
"""Positions of a feature map that are looked at, from all over it."""

WIDEST: Final = 4096
"""Inputs that are summed over; the products of more take more memory than they are worth."""

UNSEEN: Final = 0.3
"""Of the power of each input, what is taken to go its own way in samples that were not looked at."""

PLAIN: Final = frozenset({"Conv", "Conv2D", "DepthwiseConv2dNative", "Gemm", "MatMul"})
"""Types of which it is known how they multiply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
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

    def split(self, weight: Array) -> Array:
        """`weight` as (groups, outputs, inputs)."""
        turned = weight.transpose(self.order)
        if self.kernel and self.groups > 1 and self.order[0] == len(self.order) - 2:  # channel, multiplier
            return turned.reshape(self.groups, turned.shape[1], -1)
        return turned.reshape(self.groups, turned.shape[0] // self.groups, -1)

    def join(self, matrices: Array, shape: Sequence[int]) -> Array:
        """The weight of `shape` of which `split` makes `matrices`."""
        turned = matrices.reshape([shape[axis] for axis in self.order])
        return np.ascontiguousarray(turned.transpose(np.argsort(self.order)))


def form_of(op: Op, shape: Sequence[int]) -> Form | None:
    """How the weight of `op`, of this shape, is matrices; None if that is not known."""
    count = len(shape)
    if op.type not in PLAIN or (not op.kind.endswith("conv") and count != len(("inputs", "outputs"))):
        return None
    if op.type == "DepthwiseConv2dNative":
        return Form(order=(2, 3, 0, 1), groups=shape[2], kernel=tuple(shape[:2]))
    if op.type == "Conv2D":
        return Form(order=(3, 2, 0, 1), groups=1, kernel=tuple(shape[:2]))
    if op.type == "Conv":
        groups = int(op.number("group", 1))
        fits = count > len(("output", "input")) and groups > 0 and shape[0] % groups == 0
        return Form(order=tuple(range(count)), groups=groups, kernel=tuple(shape[2:])) if fits else None
    turned = bool(op.number("transB", 0) or op.number("transpose_b", 0))
    return Form(order=(0, 1) if turned else (1, 0), groups=1, kernel=())


def products(model: Model, inputs: Sequence[tuple[TensorRef, Op, Form]], samples: Samples) -> list[Array | None]:
    """X^T X for each op, float64 (groups, inputs, inputs), off its diagonal less what chance explains; see `shrunk`.

    None where no sample reaches an op, or its rows do not fit.

    Raises:
        ModelError: The model cannot be run.
    """
    runner = samples.runner(model)
    refused = runner.unwatchable([tensor for tensor, _, _ in inputs])
    shown = list(dict.fromkeys(tensor for tensor, _, _ in inputs if tensor not in refused))
    found: list[Sum | None] = [None] * len(inputs)
    for seen in runner.observe(shown, samples.feeds) if shown else ():
        for place, (tensor, op, form) in enumerate(inputs):
            total: Array | None = None
            for value in seen.get(tensor, ()):
                rows = rows_of(op, form, np.asarray(value, np.float32))
                if rows is not None:
                    made = np.matmul(rows.transpose(0, 2, 1), rows).astype(np.float64)
                    total = made if total is None else total + made
            if total is not None:
                found[place] = added(found[place], total)
    return [None if one is None else shrunk(one) for one in found]


@dataclass(frozen=True, slots=True)
class Sum:
    """Products of rows, each sample's divided by its power, summed over samples.

    Attributes:
        total: float64 (groups, inputs, inputs).
        power: The squares of what is off the diagonal, summed over the samples' own products.
        count: How many samples there are.
    """

    total: Array
    power: float
    count: int


def added(before: Sum | None, product: Array) -> Sum | None:
    """The sum with one more sample's product, as if the sample were as loud as all others.

    Else it is the loudest few that decide how weights are rounded, and other loud ones lose. One with NaN or infinite
    values says nothing.
    """
    loud = float(np.einsum("gii->", product))
    if not np.isfinite(loud):
        return before
    even = product / loud if loud else product
    power = _off_diagonal(even)
    if before is None:
        return Sum(even, power, 1)
    return Sum(before.total + even, before.power + power, before.count + 1)


def shrunk(one: Sum) -> Array:
    """The summed products, drawn towards their diagonal by the share of what is off it that chance explains.

    Of fewer rows than inputs the products know directions without any error, and rounding would put all of its errors
    there. Samples tell how far chance moves the products: rows of one sample are alike.

    Source: Schäfer and Strimmer 2005, "A Shrinkage Approach to Large-Scale Covariance Matrix Estimation", with the
    target that they call D; one share for all groups. The diagonal is raised by `UNSEEN` beside.
    """
    whole = _off_diagonal(one.total)
    share = 0.0
    if one.count > 1 and whole:
        chance = (one.power - whole / one.count) * one.count / (one.count - 1)
        share = max(1 - chance / whole, 0.0)
    index = np.arange(one.total.shape[-1])
    made = one.total * share
    made[:, index, index] = one.total[:, index, index] * (1 + UNSEEN)
    return made


def _off_diagonal(product: Array) -> float:
    """The sum of the squares off the diagonals."""
    diagonals = np.diagonal(product, axis1=1, axis2=2)
    return float(np.square(product).sum() - np.square(diagonals).sum())


def rows_of(op: Op, form: Form, value: Array) -> Array | None:
    """What the matrices multiply, float32 (groups, rows, inputs): some of all positions."""
    if not form.kernel:
        turned = op.number("transA", 0) or op.number("transpose_a", 0)
        rows = (value.T if turned else value).reshape(-1, value.shape[0] if turned else value.shape[-1])
        return rows[:: max(len(rows) // ROWS, 1)][None]
    if value.ndim != len(form.kernel) + 2:
        return None
    layout = op.attrs.get("data_format", b"NHWC" if op.type != "Conv" else b"NCHW")
    text = layout.decode() if isinstance(layout, bytes) else str(layout)
    first = text.startswith("NC")
    if not first:
        value = np.moveaxis(value, -1, 1)
    steps, spread, pads = _window(op, form.kernel, value.shape[2:], first=first)
    padded = np.pad(value, [(0, 0), (0, 0), *pads])
    wide = [(size - 1) * gap + 1 for size, gap in zip(form.kernel, spread, strict=True)]
    axes = tuple(range(2, value.ndim))
    view = np.lib.stride_tricks.sliding_window_view(padded, wide, axis=axes)
    every = slice(None)
    outer: list[slice] = [every, every, *(slice(None, None, step) for step in steps)]
    inner = [slice(None, None, gap) for gap in spread]
    view = view[tuple(outer + inner)]
    return _some_rows(view, form)


def _some_rows(view: Array, form: Form) -> Array:
    """Windows (samples, channels, positions..., kernel...) as (groups, rows, inputs)."""
    places = np.moveaxis(view, 1, -1 - len(form.kernel))  # samples, positions, channels, kernel
    lead = places.shape[: 1 + len(form.kernel)]
    count = int(np.prod(lead))
    chosen = np.unravel_index(np.arange(0, count, max(count // ROWS, 1)), lead)
    some = places[chosen]
    rows = some.reshape(len(some), form.groups, -1)
    return np.ascontiguousarray(rows.transpose(1, 0, 2))


def _window(
    op: Op, kernel: Sequence[int], sizes: Sequence[int], *, first: bool
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Strides, dilations and pads of a convolution."""
    count = len(kernel)

    def numbers(name: str) -> list[int]:
        given = [int(one) for one in op.attrs.get(name, ()) or ()]
        if len(given) == count + 2:
            return given[2:] if first else given[1:-1]
        return given or [1] * count

    steps, spread = numbers("strides"), numbers("dilations")
    given = op.attrs.get("auto_pad" if op.type == "Conv" else "padding", "")
    mode = given.decode() if isinstance(given, bytes) else str(given)
    listed = [int(one) for one in op.attrs.get("pads", ()) or ()]
    if not mode.startswith("SAME"):
        ends = listed if len(listed) == 2 * count and mode != "VALID" else [0] * (2 * count)
        return steps, spread, list(zip(ends[:count], ends[count:], strict=True))
    pads = []
    for size, window, step, gap in zip(sizes, kernel, steps, spread, strict=True):
        whole = max((-(-size // step) - 1) * step + (window - 1) * gap + 1 - size, 0)
        less, more = whole // 2, whole - whole // 2
        pads.append((more, less) if mode == "SAME_LOWER" else (less, more))
    return steps, spread, pads


__all__ = ["WIDEST", "Form", "form_of", "products", "rows_of"]
