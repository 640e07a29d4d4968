"""The arithmetic of quantization in numpy: affine scales and zero points, and what TensorFlow's own ops compute."""

from graphquant.numerics.affine import (
    LARGEST_VALUE,
    MAX_BITS,
    MIN_BITS,
    SMALLEST_SCALE,
    Array,
    Dynamic,
    IntType,
    QParams,
    Range,
    along,
    choose,
    dequantize,
    from_scale,
    quantize,
)

__all__ = [
    "LARGEST_VALUE",
    "MAX_BITS",
    "MIN_BITS",
    "SMALLEST_SCALE",
    "Array",
    "Dynamic",
    "IntType",
    "QParams",
    "Range",
    "along",
    "choose",
    "dequantize",
    "from_scale",
    "quantize",
]
