"""Restore the weights that preparation steps replaced from their records."""

from __future__ import annotations

import base64
import math
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.errors import ModelError
from graphquant.quantize.preparation_undo import _array_digest, _divide_by_factor, _float_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.numerics import Array
    from graphquant.quantize.preparation_undo import Step


def original_weights(
    step: Step, read_constant: Callable[[str], Array | None]
) -> dict[tuple[str, str], tuple[Array, bool]]:
    """Return the weights that a step replaced, by graph and op, each with True if it is exact.

    `read_constant` returns the value of a constant of the graph after the step by name, or None.
    """
    weights = {}
    for record in step.undo.get("removed", ()):
        try:
            value = record.get("value")
            op_key = str(record.get("graph", "")), str(record["op"])
            if value is None:
                continue
            if "data" in value:
                weights[op_key] = decode_array(value), True
                continue
            current = read_constant(str(value["now"]))
            if current is not None:
                weights[op_key] = restore_weight(value, current)
        except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
            raise ModelError(
                f"The record of step {step.step} on {step.target} is damaged. Create the plan again."
            ) from error
    return weights


def restore_weight(record: dict[str, Any], current: Array) -> tuple[Array, bool]:
    """Restore the weight that was scaled to `current`; approximately if that differs from the original product."""
    if current.size != math.prod(record["shape"]):
        raise ValueError("the sizes differ")
    if "factor" not in record:
        return current, _array_digest(current) == record["sha256"]
    factor = decode_array(record["factor"])
    quotient = _divide_by_factor(current, factor, record["split"], record["along"])
    dtype = np.dtype(record["steps"]["dtype"])
    packed, max_bytes = base64.b64decode(record["steps"]["data"]), current.size * dtype.itemsize + 1
    steps = np.frombuffer(zlib.decompressobj().decompress(packed, max_bytes), dtype).astype(np.int32)
    exact = (_float_bits(quotient) + steps.reshape(quotient.shape)).view(np.float32)
    if _array_digest(exact) == record["sha256"]:
        return exact, True
    return quotient, False


def decode_array(record: dict[str, Any]) -> Array:
    """Return the array of a record that `encode_array` made."""
    return np.frombuffer(base64.b64decode(record["data"]), record["dtype"]).reshape(record["shape"])
