"""The arithmetic of quantization in numpy: affine scales and zero points, and those of TensorFlow's ops."""

from graphquant.numerics.affine import (
    LARGEST_VALUE,
    SMALLEST_SCALE,
    DynamicQParams,
    QParams,
    QuantizationGrid,
    Range,
    block_scale_shape,
    broadcast_along_axis,
    broadcast_to_tensor,
    dequantize,
    iter_blocks,
    iter_slabs,
    qparams_from_scale,
    quantize,
    quantize_to_dtype,
    round_scale_to_float16,
    split_block_scales,
    split_blocks,
)
from graphquant.numerics.data_types import (
    FLOAT4_NAME,
    FLOAT8_NAMES,
    FLOAT_NAMES,
    MIN_BITS,
    Array,
    FloatType,
    IntType,
    QType,
    parse_type,
)
