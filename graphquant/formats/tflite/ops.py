"""The table of TFLite's ops: kind, input roles, channel axis of the weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from graphquant.ir import OpInfo

# The part of TFLite's schema that is read: fields of its tables, dtypes and ops.
#
# https://github.com/tensorflow/tensorflow/blob/master/tensorflow/compiler/mlir/lite/schema/schema.fbs : names and
# numbers define the format and never change; a test compares them with those in TensorFlow.

IDENTIFIER: Final = b"TFL3"  # follows the first four bytes of each file


def _number_fields(names: str) -> Mapping[str, int]:
    return {name: number for number, name in enumerate(names.split())}


MODEL: Final = _number_fields("version operator_codes subgraphs description buffers")
SUBGRAPH: Final = _number_fields("tensors inputs outputs operators name")
TENSOR: Final = _number_fields(
    "shape type buffer name quantization is_variable sparsity shape_signature has_rank variant_tensors external_buffer"
)
QUANTIZATION: Final = _number_fields("min max scale zero_point details_type details quantized_dimension")
BLOCKWISE: Final = _number_fields("scales zero_points block_size")
OPERATOR: Final = _number_fields("opcode_index inputs outputs builtin_options_type builtin_options")
OPERATOR_CODE: Final = _number_fields("deprecated_builtin_code custom_code version builtin_code")
BUFFER: Final = _number_fields("data offset size")
IF_OPTIONS: Final = _number_fields("then_subgraph_index else_subgraph_index")
WHILE_OPTIONS: Final = _number_fields("cond_subgraph_index body_subgraph_index")
CALL_OPTIONS: Final = _number_fields("subgraph")
CALL_ONCE_OPTIONS: Final = _number_fields("init_subgraph_index")

_TYPES: Final = (
    "float32 float16 int32 uint8 int64 string bool int16 complex64 int8 float64 complex128 uint64 resource variant"
    " uint32 uint16 int4 bfloat16 int2 uint4"
)
TYPES: Final = tuple(_TYPES.split())  # numpy-like dtype names by TensorType

DETAILS: Final = ("", "custom", "blockwise")
"""Forms of quantization other than one scale per tensor or channel, by QuantizationDetails."""

CUSTOM: Final = "CUSTOM"  # the op whose name is in its operator code

_BUILTINS: Final = (
    "ADD AVERAGE_POOL_2D CONCATENATION CONV_2D DEPTHWISE_CONV_2D DEPTH_TO_SPACE DEQUANTIZE EMBEDDING_LOOKUP FLOOR"
    " FULLY_CONNECTED HASHTABLE_LOOKUP L2_NORMALIZATION L2_POOL_2D LOCAL_RESPONSE_NORMALIZATION LOGISTIC LSH_PROJECTION"
    " LSTM MAX_POOL_2D MUL RELU RELU_N1_TO_1 RELU6 RESHAPE RESIZE_BILINEAR RNN SOFTMAX SPACE_TO_DEPTH SVDF TANH"
    " CONCAT_EMBEDDINGS SKIP_GRAM CALL CUSTOM EMBEDDING_LOOKUP_SPARSE PAD UNIDIRECTIONAL_SEQUENCE_RNN GATHER"
    " BATCH_TO_SPACE_ND SPACE_TO_BATCH_ND TRANSPOSE MEAN SUB DIV SQUEEZE UNIDIRECTIONAL_SEQUENCE_LSTM STRIDED_SLICE"
    " BIDIRECTIONAL_SEQUENCE_RNN EXP TOPK_V2 SPLIT LOG_SOFTMAX DELEGATE BIDIRECTIONAL_SEQUENCE_LSTM CAST PRELU MAXIMUM"
    " ARG_MAX MINIMUM LESS NEG PADV2 GREATER GREATER_EQUAL LESS_EQUAL SELECT SLICE SIN TRANSPOSE_CONV SPARSE_TO_DENSE"
    " TILE EXPAND_DIMS EQUAL NOT_EQUAL LOG SUM SQRT RSQRT SHAPE POW ARG_MIN FAKE_QUANT REDUCE_PROD REDUCE_MAX PACK"
    " LOGICAL_OR ONE_HOT LOGICAL_AND LOGICAL_NOT UNPACK REDUCE_MIN FLOOR_DIV REDUCE_ANY SQUARE ZEROS_LIKE FILL"
    " FLOOR_MOD RANGE RESIZE_NEAREST_NEIGHBOR LEAKY_RELU SQUARED_DIFFERENCE MIRROR_PAD ABS SPLIT_V UNIQUE CEIL"
    " REVERSE_V2 ADD_N GATHER_ND COS WHERE RANK ELU REVERSE_SEQUENCE MATRIX_DIAG QUANTIZE MATRIX_SET_DIAG ROUND"
    " HARD_SWISH IF WHILE NON_MAX_SUPPRESSION_V4 NON_MAX_SUPPRESSION_V5 SCATTER_ND SELECT_V2 DENSIFY SEGMENT_SUM"
    " BATCH_MATMUL PLACEHOLDER_FOR_GREATER_OP_CODES CUMSUM CALL_ONCE BROADCAST_TO RFFT2D CONV_3D IMAG REAL COMPLEX_ABS"
    " HASHTABLE HASHTABLE_FIND HASHTABLE_IMPORT HASHTABLE_SIZE REDUCE_ALL CONV_3D_TRANSPOSE VAR_HANDLE READ_VARIABLE"
    " ASSIGN_VARIABLE BROADCAST_ARGS RANDOM_STANDARD_NORMAL BUCKETIZE RANDOM_UNIFORM MULTINOMIAL GELU"
    " DYNAMIC_UPDATE_SLICE RELU_0_TO_1 UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_SUM ATAN2"
    " UNSORTED_SEGMENT_MIN SIGN BITCAST BITWISE_XOR RIGHT_SHIFT STABLEHLO_LOGISTIC STABLEHLO_ADD STABLEHLO_DIVIDE"
    " STABLEHLO_MULTIPLY STABLEHLO_MAXIMUM STABLEHLO_RESHAPE STABLEHLO_CLAMP STABLEHLO_CONCATENATE"
    " STABLEHLO_BROADCAST_IN_DIM STABLEHLO_CONVOLUTION STABLEHLO_SLICE STABLEHLO_CUSTOM_CALL STABLEHLO_REDUCE"
    " STABLEHLO_ABS STABLEHLO_AND STABLEHLO_COSINE STABLEHLO_EXPONENTIAL STABLEHLO_FLOOR STABLEHLO_LOG"
    " STABLEHLO_MINIMUM STABLEHLO_NEGATE STABLEHLO_OR STABLEHLO_POWER STABLEHLO_REMAINDER STABLEHLO_RSQRT"
    " STABLEHLO_SELECT STABLEHLO_SUBTRACT STABLEHLO_TANH STABLEHLO_SCATTER STABLEHLO_COMPARE STABLEHLO_CONVERT"
    " STABLEHLO_DYNAMIC_SLICE STABLEHLO_DYNAMIC_UPDATE_SLICE STABLEHLO_PAD STABLEHLO_IOTA STABLEHLO_DOT_GENERAL"
    " STABLEHLO_REDUCE_WINDOW STABLEHLO_SORT STABLEHLO_WHILE STABLEHLO_GATHER STABLEHLO_TRANSPOSE DILATE"
    " STABLEHLO_RNG_BIT_GENERATOR REDUCE_WINDOW STABLEHLO_COMPOSITE STABLEHLO_SHIFT_LEFT STABLEHLO_CBRT"
    " STABLEHLO_CASE"
)
BUILTINS: Final = tuple(_BUILTINS.split())  # names of the built-in ops by BuiltinOperator

_SAME_NAMES: Final = (
    "SUB MUL DIV POW RELU RELU6 LEAKY_RELU ELU GELU HARD_SWISH TANH SOFTMAX LOG_SOFTMAX EXP LOG SQRT RSQRT NEG"
    " ABS SQUEEZE PACK UNPACK CAST DEPTH_TO_SPACE SPACE_TO_DEPTH QUANTIZE DEQUANTIZE WHILE"
)
"""Ops with inputs only, whose kind is their name in lower case."""

_KINDS_BY_ROLES: Final[Mapping[tuple[str, ...], Mapping[str, str]]] = {
    (): {"variable": "VAR_HANDLE"},
    ("input",): {
        **{name.lower(): name for name in _SAME_NAMES.split()},
        "add": "ADD ADD_N",
        "max": "MAXIMUM",
        "min": "MINIMUM",
        "clip": "RELU_N1_TO_1 RELU_0_TO_1",
        "sigmoid": "LOGISTIC",
        "max_pool": "MAX_POOL_2D",
        "avg_pool": "AVERAGE_POOL_2D",
        "lrn": "LOCAL_RESPONSE_NORMALIZATION",
        "concat": "CONCATENATION",
        "shape": "SHAPE RANK",
        "qdq": "FAKE_QUANT",
        "call": "CALL CALL_ONCE",
        "random": "RANDOM_STANDARD_NORMAL RANDOM_UNIFORM MULTINOMIAL",
    },
    ("input", "weight"): {"matmul": "BATCH_MATMUL", "prelu": "PRELU"},
    ("input", "axis"): {
        "reduce_mean": "MEAN",
        "reduce_sum": "SUM",
        "reduce_max": "REDUCE_MAX",
        "reduce_min": "REDUCE_MIN",
        "arg_max": "ARG_MAX",
        "transpose": "TRANSPOSE",
        "unsqueeze": "EXPAND_DIMS",
    },
    ("input", "shape"): {
        "top_k": "TOPK_V2",
        "reshape": "RESHAPE",
        "expand": "BROADCAST_TO",
        "tile": "TILE",
        "pad": "PAD MIRROR_PAD",
        "resize": "RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR",
    },
    ("input", "shape", "axis"): {"split": "SPLIT_V"},
    ("input", "shape", "other"): {"pad": "PADV2"},
    ("input", "indices"): {"slice": "SLICE STRIDED_SLICE", "gather": "GATHER GATHER_ND"},
    ("axis", "input"): {"split": "SPLIT"},
    ("shape", "input"): {"expand": "FILL"},
    ("indices", "input"): {"gather": "EMBEDDING_LOOKUP"},
    ("condition", "input"): {"where": "SELECT SELECT_V2", "if": "IF"},
    ("input", "weight", "recurrent_weight", "bias", "variable"): {"rnn": "RNN UNIDIRECTIONAL_SEQUENCE_RNN"},
    (
        "input",
        *("weight",) * 4,
        *("recurrent_weight",) * 4,
        *("peephole",) * 3,
        *("bias",) * 4,
        "weight",
        "bias",
        *("variable",) * 2,
        "scale",
    ): {"lstm": "UNIDIRECTIONAL_SEQUENCE_LSTM"},
    ("variable",): {"read_variable": "READ_VARIABLE"},
    ("variable", "input"): {"stateful": "ASSIGN_VARIABLE"},
}
_WEIGHTED_ROLES: Final = ("input", "weight", "bias")
_TRANSPOSE_CONV_ROLES: Final = ("shape", "weight", "input", "bias")

_OP_INFOS: Final[Mapping[str, OpInfo]] = {
    **{
        name: OpInfo(kind, roles)
        for roles, kinds in _KINDS_BY_ROLES.items()
        for kind, names in kinds.items()
        for name in names.split()
    },
    "CONV_2D": OpInfo("conv", _WEIGHTED_ROLES, 0),
    "CONV_3D": OpInfo("conv", _WEIGHTED_ROLES, 4),
    "DEPTHWISE_CONV_2D": OpInfo("depthwise_conv", _WEIGHTED_ROLES, 3),
    "TRANSPOSE_CONV": OpInfo("conv_transpose", _TRANSPOSE_CONV_ROLES, 0),
    "CONV_3D_TRANSPOSE": OpInfo("conv_transpose", _TRANSPOSE_CONV_ROLES, 3),
    "FULLY_CONNECTED": OpInfo("gemm", _WEIGHTED_ROLES, 0),
}

SUBGRAPH_FIELDS: Final[Mapping[str, tuple[Mapping[str, int], Mapping[str, tuple[int | None, bool]]]]] = {
    "IF": (IF_OPTIONS, {"then_subgraph_index": (1, False), "else_subgraph_index": (1, False)}),
    "WHILE": (WHILE_OPTIONS, {"cond_subgraph_index": (None, True), "body_subgraph_index": (0, True)}),
    "CALL": (CALL_OPTIONS, {"subgraph": (0, False)}),
    "CALL_ONCE": (CALL_ONCE_OPTIONS, {"init_subgraph_index": (None, False)}),
}
"""By op type: the fields of its options, and the fields that name subgraphs with (offset, loop) of the `Call`."""


def describe_tflite_op(op_type: str) -> OpInfo:
    """Return the properties of an op type."""
    return _OP_INFOS.get(op_type, OpInfo("other"))
