"""TFLite files made by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.tflite_files import Writer, code, ints

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def build_tflite() -> Callable[[dict[str, Any]], bytes]:
    """A function that makes the bytes of a TFLite file."""
    return lambda model: Writer().build(model)


@pytest.fixture
def full_tflite_model() -> dict[str, Any]:
    """A model with every supported feature: int8 per channel and int4 constants, a loop, a custom op, a variable."""
    scales = np.array([0.5, 0.25], np.float32)
    main = {
        "tensors": [
            {
                "name": "x",
                "shape": ints(1, 2),
                "shape_signature": ints(-1, 2),
                "type": ("b", 9),
                "quantization": {"scale": np.array([0.1], np.float32), "zero_point": np.array([-3], np.int64)},
            },
            {
                "name": "w",
                "shape": ints(2, 2),
                "type": ("b", 9),
                "buffer": ("I", 1),
                "quantization": {
                    "scale": scales,
                    "zero_point": np.zeros(2, np.int64),
                    "quantized_dimension": ("i", 0),
                    "min": np.array([-1, -2], np.float32),
                    "max": np.array([1, 2], np.float32),
                    "details_type": ("B", 2),
                },
            },
            {"name": "y", "shape": ints(1, 2), "type": ("b", 9)},
            {"name": "four", "shape": ints(3), "type": ("b", 17), "buffer": ("I", 2)},
            {"name": "state", "shape": ints(1), "is_variable": ("b", 1)},
            {"name": "y", "shape": ints(1, 2), "type": ("b", 9)},
            {"name": "far", "shape": ints(2), "buffer": ("I", 3)},
        ],
        "inputs": ints(0),
        "outputs": ints(5),
        "operators": [
            {"opcode_index": ("I", 0), "inputs": ints(0, 1, -1), "outputs": ints(2)},
            {"opcode_index": ("I", 1), "inputs": ints(2, 4, 6), "outputs": ints(5)},
            {
                "opcode_index": ("I", 2),
                "inputs": ints(),
                "outputs": ints(),
                "builtin_options": {"cond_subgraph_index": ("i", 1), "body_subgraph_index": ("i", 1)},
            },
        ],
    }
    body = {
        "name": "body",
        "tensors": [{"name": "t", "shape": ints()}],
        "inputs": ints(0),
        "outputs": ints(0),
    }
    return {
        "operator_codes": [
            code("FULLY_CONNECTED", deprecated_builtin_code=("b", 9)),
            code("CUSTOM", custom_code="My_Op"),
            code("WHILE"),
        ],
        "buffers": [
            {},
            {"data": np.array([1, 2, 3, -4], np.int8)},
            {"data": np.array([0x1F, 0x07], np.uint8)},
            {"offset": ("Q", 1 << 40), "size": ("Q", 8)},
        ],
        "subgraphs": [main, body],
    }
