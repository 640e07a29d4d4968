"""Tests of `graphquant.formats.onnx.runtime`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnxruntime
import pytest

from graphquant.formats.onnx import runtime

if TYPE_CHECKING:
    import numpy as np

COLUMNS = [1, 8, 16, 24, 33, 56, 64, 100, 150]


class AlteredSession:
    """A session whose products are wrong from `rows` rows on, in one element."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __call__(self, data: bytes, options: object, providers: list[str]) -> AlteredSession:
        """Open the session."""
        self.session = onnxruntime.capi.onnxruntime_inference_collection.InferenceSession(data, options, providers)
        return self

    def run(self, names: None, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Return the product, with another last element if it has enough rows."""
        (product,) = self.session.run(names, feed)
        if len(product) >= self.rows:
            product[-1, -1] += 1
        return [product]


@pytest.mark.parametrize("types", sorted(runtime.PRODUCT_TYPES))
def test_products_are_exact(types: tuple[str, str]) -> None:
    """Releases since 1.26 have no wrong product, and older ones only those of 32 rows, on CPUs with AMX."""
    known = {0} if runtime.RELEASE >= (1, 26) else {0, 32}
    assert {runtime.find_wrong_product(*types, columns) for columns in COLUMNS} <= known


@pytest.mark.parametrize("rows", [1, 6, 32, 64])
def test_wrong_products_are_found(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The smallest number of rows with a wrong element is returned."""
    monkeypatch.setattr(onnxruntime, "InferenceSession", AlteredSession(rows))
    assert runtime.find_wrong_product.__wrapped__("int8", "int8", 16) == rows
