"""The intermediate representation: an index over the source model, as networkx graphs of ops."""

from graphquant.ir.channels import (
    channel_axis,
    channel_view,
    input_channels,
    kernel_size,
    output_channels,
    rows,
    summed_axis,
)
from graphquant.ir.check import check
from graphquant.ir.graph import CONTROL, Graph, Model, bulk
from graphquant.ir.parameter import FORWARDING, Parameters, readable
from graphquant.ir.twins import Twins
from graphquant.ir.types import (
    FLOAT_TYPES,
    LIMITING_KINDS,
    NO_ATTRS,
    QUANTIZATION_KINDS,
    WEIGHTED_KINDS,
    Call,
    DataType,
    Op,
    Output,
    Shape,
    Stored,
    TensorRef,
    Use,
    named,
)

__all__ = [
    "CONTROL",
    "FLOAT_TYPES",
    "FORWARDING",
    "LIMITING_KINDS",
    "NO_ATTRS",
    "QUANTIZATION_KINDS",
    "WEIGHTED_KINDS",
    "Call",
    "DataType",
    "Graph",
    "Model",
    "Op",
    "Output",
    "Parameters",
    "Shape",
    "Stored",
    "TensorRef",
    "Twins",
    "Use",
    "bulk",
    "channel_axis",
    "channel_view",
    "check",
    "input_channels",
    "kernel_size",
    "named",
    "output_channels",
    "readable",
    "rows",
    "summed_axis",
]
