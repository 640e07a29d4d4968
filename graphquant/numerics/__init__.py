"""The arithmetic of quantization in numpy: affine scales and zero points, and what TensorFlow's own ops compute."""

from graphquant.numerics.affine import (
    LARGEST_VALUE,
    SMALLEST_SCALE,
    Dynamic,
    Grid,
    QParams,
    Range,
    along,
    choose,
    dequantize,
    from_scale,
    halved,
    over,
    quantize,
    slabs,
    stored,
)
from graphquant.numerics.blocks import blocks_of, in_blocks
from graphquant.numerics.types import FLOAT8, MAX_BITS, MIN_BITS, Array, FloatType, IntType, QType, parse_type

__all__ = [
    "FLOAT8",
    "LARGEST_VALUE",
    "MAX_BITS",
    "MIN_BITS",
    "SMALLEST_SCALE",
    "Array",
    "Dynamic",
    "FloatType",
    "Grid",
    "IntType",
    "QParams",
    "QType",
    "Range",
    "along",
    "blocks_of",
    "choose",
    "dequantize",
    "from_scale",
    "halved",
    "in_blocks",
    "over",
    "parse_type",
    "quantize",
    "slabs",
    "stored",
]
