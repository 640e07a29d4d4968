"""Properties of the model formats on which neutral code depends.

Outside `formats`, code asks for these properties instead of comparing the name of a format.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatTraits:
    """Properties of one model format.

    Attributes:
        runtime: Framework that runs the models.
        rewritable: True if models can be changed, written and run.
        predictable: True if the backends of `check` predict how they run the models.
        acyclic: True if no graph has cycles. The loop frames of TensorFlow 1 are cycles.
        named_values: True if values have names of their own, so that removing an op keeps the name of an output.
        removable_arguments: True if unused arguments of functions can be removed.
        stacked_matmul: True if matrix products also multiply stacks of matrices, along any axis.
        type_attrs: True if ops store their data types in attributes.
        constant_type: Op type of a constant.
        select_type: Op type that selects one of two tensors by a condition.
        data_format: Default data format of convolutions.
    """

    runtime: str
    rewritable: bool = True
    predictable: bool = False
    acyclic: bool = False
    named_values: bool = False
    removable_arguments: bool = False
    stacked_matmul: bool = False
    type_attrs: bool = False
    constant_type: str = ""
    select_type: str = ""
    data_format: str = "NHWC"


FORMAT_TRAITS: dict[str, FormatTraits] = {
    "onnx": FormatTraits(
        runtime="onnxruntime",
        predictable=True,
        acyclic=True,
        named_values=True,
        removable_arguments=True,
        stacked_matmul=True,
        constant_type="Constant",
        select_type="Where",
        data_format="NCHW",
    ),
    "tensorflow": FormatTraits(runtime="TensorFlow", type_attrs=True, constant_type="Const", select_type="SelectV2"),
    "tflite": FormatTraits(runtime="TFLite", rewritable=False, stacked_matmul=True, data_format="NCHW"),
}
"""Traits by the keys of the format table."""
