"""Types of quantized values: integers of any width, and types of ONNX with 4 or 8 bits that are floats."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

MIN_BITS, MAX_BITS = 2, 32


@dataclass(frozen=True, slots=True)
class IntType:
    """An integer type of `bits` bits."""

    bits: int
    signed: bool

    @property
    def name(self) -> str:
        """The numpy-like name, `int8`."""
        return f"{'int' if self.signed else 'uint'}{self.bits}"

    def limits(self, *, narrow: bool = False) -> tuple[int, int]:
        """Return the smallest and largest quantized value; `narrow` excludes the most negative one of a signed type."""
        if self.signed:
            return -(1 << (self.bits - 1)) + narrow, (1 << (self.bits - 1)) - 1
        return 0, (1 << self.bits) - 1

    @property
    def symmetric_zero_point(self) -> int:
        """The zero point of a symmetric type: 0, or the middle of an unsigned type."""
        return 0 if self.signed else 1 << (self.bits - 1)

    @property
    def container(self) -> str:
        """The smallest type of 4, 8, 16 or 32 bits that contains it."""
        bits = next(size for size in (4, 8, 16, 32) if size >= self.bits)
        return f"{'int' if self.signed else 'uint'}{bits}"

    @classmethod
    def parse(cls, name: str) -> IntType:
        """Return the type called `name`. Raises a ValueError that lists the possible names."""
        match = re.fullmatch(r"(u?)int(\d+)", name)
        max_bits = MAX_BITS - 1 if match and match[1] else MAX_BITS  # quantized values are stored as int32
        if not match or not MIN_BITS <= int(match[2]) <= max_bits:
            raise ValueError(f"{name!r} is not an integer type; use int2 to int32 or uint2 to uint31")
        return cls(int(match[2]), not match[1])


@dataclass(frozen=True, slots=True)
class FloatType:
    """A float type of 4 or 8 bits. Its steps grow with the values, and 0.0 is always exact.

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", Rouhani et al. 2023, "OCP Microscaling Formats
    (MX) Specification", and the ONNX pages on float8 and float4.
    """

    name: str
    signed: ClassVar[bool] = True
    symmetric_zero_point: ClassVar[int] = 0

    def __post_init__(self) -> None:
        """Check the name. Raises a ValueError that lists the possible names."""
        if self.name not in FLOAT_NAMES:
            raise ValueError(f"{self.name!r} is not a float type of few bits; use {' or '.join(FLOAT_NAMES)}")

    @property
    def bits(self) -> int:
        """Width in bits."""
        return int(ml_dtypes.finfo(self.name).bits)

    def limits(self, *, narrow: bool = False) -> tuple[float, float]:  # noqa: ARG002  # as of IntType
        """Return the smallest and largest finite value."""
        largest = float(ml_dtypes.finfo(self.name).max)
        return -largest, largest

    @property
    def container(self) -> str:
        """The type itself."""
        return self.name

    def round_values(self, x: Array) -> Array:
        """Round `x` (float32) to the nearest values of the type, ties to even, as float32 of the same shape.

        Larger values and infinity become the largest value, as with `saturate = 1` in ONNX. NaN stays NaN, except that
        4 bits have none.
        """
        low, high = self.limits()
        return np.clip(x, low, high).astype(getattr(ml_dtypes, self.name)).astype(np.float32)


FLOAT8_NAMES = ("float8_e4m3fn", "float8_e5m2")
"""The float types of 8 bits: 4 exponent bits and 3 of the mantissa up to 448, or 5 and 2 up to 57344."""

FLOAT4_NAME = "float4_e2m1fn"
"""The float type of 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""

FLOAT_NAMES = (*FLOAT8_NAMES, FLOAT4_NAME)

QType = IntType | FloatType


@lru_cache(maxsize=256)
def parse_type(name: str) -> QType:
    """Return the type called `name`. Raises a ValueError that lists the possible names."""
    return FloatType(name) if name.startswith("float") else IntType.parse(name)
