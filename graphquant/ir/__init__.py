"""The intermediate representation: an index over the source model, as networkx graphs of ops."""

from graphquant.ir.function_clones import FunctionClones
from graphquant.ir.graph import CONTROL_EDGE, Graph, Model, paused_gc
from graphquant.ir.invariants import check_invariants
from graphquant.ir.parameters import FORWARDING_KINDS, Parameters, require_finite_weight
from graphquant.ir.types import (
    CLAMPING_KINDS,
    FLOAT_TYPES,
    NO_ATTRS,
    QUANTIZATION_KINDS,
    WEIGHTED_KINDS,
    Call,
    DataType,
    Op,
    Output,
    Shape,
    StoredQuantization,
    TensorRef,
    Use,
    qualified_op_name,
)
from graphquant.ir.weight_layout import (
    channel_axis,
    input_channels,
    kernel_size,
    matrix_rows,
    merged_channel_shape,
    output_channels,
    reduction_axis,
)

__all__ = [
    "CLAMPING_KINDS",
    "CONTROL_EDGE",
    "Call",
    "DataType",
    "FLOAT_TYPES",
    "FORWARDING_KINDS",
    "FunctionClones",
    "Graph",
    "Model",
    "NO_ATTRS",
    "Op",
    "Output",
    "Parameters",
    "QUANTIZATION_KINDS",
    "Shape",
    "StoredQuantization",
    "TensorRef",
    "Use",
    "WEIGHTED_KINDS",
    "channel_axis",
    "check_invariants",
    "input_channels",
    "kernel_size",
    "matrix_rows",
    "merged_channel_shape",
    "output_channels",
    "paused_gc",
    "qualified_op_name",
    "reduction_axis",
    "require_finite_weight",
]
