"""The table of TFLite's ops: neutral kind, input roles, channel axis of the weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from graphquant.formats.tflite import schema

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What an op type is.

    Attributes:
        kind: The neutral kind.
        roles: The role of each input slot; the last one stands for all that follow.
        axis: The output channel axis of the "weight" slot.
    """

    kind: str
    roles: tuple[str, ...] = ("input",)
    axis: int | None = None


_WEIGHTED: Final = ("input", "weight", "bias")
_TRANSPOSED: Final = ("shape", "weight", "input", "bias")
_REDUCE: Final = ("input", "axis")
_SHAPED: Final = ("input", "shape")
_RNN: Final = ("input", "weight", "recurrent_weight", "bias", "variable")
_LSTM: Final = (
    "input",
    *("weight",) * 4,
    *("recurrent_weight",) * 4,
    *("peephole",) * 3,
    *("bias",) * 4,
    "weight",
    "bias",
    *("variable",) * 2,
    "scale",
)

_ALIKE: Final = {
    name: OpInfo(kind)
    for kind, names in {
        "add": "ADD ADD_N",
        "sub": "SUB",
        "mul": "MUL",
        "div": "DIV",
        "max": "MAXIMUM",
        "min": "MINIMUM",
        "pow": "POW",
        "relu": "RELU",
        "relu6": "RELU6",
        "clip": "RELU_N1_TO_1 RELU_0_TO_1",
        "leaky_relu": "LEAKY_RELU",
        "elu": "ELU",
        "gelu": "GELU",
        "hard_swish": "HARD_SWISH",
        "sigmoid": "LOGISTIC",
        "tanh": "TANH",
        "softmax": "SOFTMAX",
        "log_softmax": "LOG_SOFTMAX",
        "exp": "EXP",
        "log": "LOG",
        "sqrt": "SQRT",
        "rsqrt": "RSQRT",
        "neg": "NEG",
        "abs": "ABS",
        "max_pool": "MAX_POOL_2D",
        "avg_pool": "AVERAGE_POOL_2D",
        "lrn": "LOCAL_RESPONSE_NORMALIZATION",
        "concat": "CONCATENATION",
        "squeeze": "SQUEEZE",
        "pack": "PACK",
        "unpack": "UNPACK",
        "cast": "CAST",
        "shape": "SHAPE RANK",
        "depth_to_space": "DEPTH_TO_SPACE",
        "space_to_depth": "SPACE_TO_DEPTH",
        "quantize": "QUANTIZE",
        "dequantize": "DEQUANTIZE",
        "qdq": "FAKE_QUANT",
        "while": "WHILE",
        "call": "CALL CALL_ONCE",
        "random": "RANDOM_STANDARD_NORMAL RANDOM_UNIFORM MULTINOMIAL",
    }.items()
    for name in names.split()
}

_TABLE: Final[Mapping[str, OpInfo]] = {
    **_ALIKE,
    "CONV_2D": OpInfo("conv", _WEIGHTED, 0),
    "CONV_3D": OpInfo("conv", _WEIGHTED, 4),
    "DEPTHWISE_CONV_2D": OpInfo("depthwise_conv", _WEIGHTED, 3),
    "TRANSPOSE_CONV": OpInfo("conv_transpose", _TRANSPOSED, 0),
    "CONV_3D_TRANSPOSE": OpInfo("conv_transpose", _TRANSPOSED, 3),
    "FULLY_CONNECTED": OpInfo("gemm", _WEIGHTED, 0),
    "BATCH_MATMUL": OpInfo("matmul", ("input", "weight")),
    "RNN": OpInfo("rnn", _RNN),
    "UNIDIRECTIONAL_SEQUENCE_RNN": OpInfo("rnn", _RNN),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": OpInfo("lstm", _LSTM),
    "PRELU": OpInfo("prelu", ("input", "weight")),
    "MEAN": OpInfo("reduce_mean", _REDUCE),
    "SUM": OpInfo("reduce_sum", _REDUCE),
    "REDUCE_MAX": OpInfo("reduce_max", _REDUCE),
    "REDUCE_MIN": OpInfo("reduce_min", _REDUCE),
    "ARG_MAX": OpInfo("arg_max", _REDUCE),
    "TOPK_V2": OpInfo("top_k", _SHAPED),
    "SPLIT": OpInfo("split", ("axis", "input")),
    "SPLIT_V": OpInfo("split", ("input", "shape", "axis")),
    "SLICE": OpInfo("slice", ("input", "indices")),
    "STRIDED_SLICE": OpInfo("slice", ("input", "indices")),
    "GATHER": OpInfo("gather", ("input", "indices")),
    "GATHER_ND": OpInfo("gather", ("input", "indices")),
    "EMBEDDING_LOOKUP": OpInfo("gather", ("indices", "input")),
    "RESHAPE": OpInfo("reshape", _SHAPED),
    "TRANSPOSE": OpInfo("transpose", _REDUCE),
    "EXPAND_DIMS": OpInfo("unsqueeze", _REDUCE),
    "BROADCAST_TO": OpInfo("expand", _SHAPED),
    "FILL": OpInfo("expand", ("shape", "input")),
    "TILE": OpInfo("tile", _SHAPED),
    "PAD": OpInfo("pad", _SHAPED),
    "PADV2": OpInfo("pad", ("input", "shape", "other")),
    "MIRROR_PAD": OpInfo("pad", _SHAPED),
    "RESIZE_BILINEAR": OpInfo("resize", _SHAPED),
    "RESIZE_NEAREST_NEIGHBOR": OpInfo("resize", _SHAPED),
    "SELECT": OpInfo("where", ("condition", "input")),
    "SELECT_V2": OpInfo("where", ("condition", "input")),
    "IF": OpInfo("if", ("condition", "input")),
    "VAR_HANDLE": OpInfo("variable", ()),
    "READ_VARIABLE": OpInfo("read_variable", ("variable",)),
    "ASSIGN_VARIABLE": OpInfo("stateful", ("variable", "input")),
}

CALLS: Final[Mapping[str, tuple[Mapping[str, int], Mapping[str, tuple[int | None, bool]]]]] = {
    "IF": (schema.IF_OPTIONS, {"then_subgraph_index": (1, False), "else_subgraph_index": (1, False)}),
    "WHILE": (schema.WHILE_OPTIONS, {"cond_subgraph_index": (None, True), "body_subgraph_index": (0, True)}),
    "CALL": (schema.CALL_OPTIONS, {"subgraph": (0, False)}),
    "CALL_ONCE": (schema.CALL_ONCE_OPTIONS, {"init_subgraph_index": (None, False)}),
}
"""Op type to its options' fields, and to the fields that name subgraphs with (offset, loop) of the `Call`."""


def describe(op_type: str) -> OpInfo:
    """What an op of this type is."""
    return _TABLE.get(op_type, OpInfo("other"))
