"""Fixtures of the ONNX format's tests: models written as text, and insertions into them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest

from graphquant.formats.onnx.reader import model_from_message
from graphquant.ir import Model, Op, Output, TensorRef, check_invariants

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]


@pytest.fixture
def load_text() -> Callable[[str], Model]:
    """Return a function that loads a model written in onnx's text form."""

    def make(text: str) -> Model:
        model = model_from_message(onnx.parser.parse_model(text))
        check_invariants(model, "load")
        return model

    return make


@pytest.fixture
def identity_at() -> Callable[..., TensorRef]:
    """Return a function that inserts an Identity after a tensor, for all of its readers or some."""

    def insert(
        model: Model, tensor: TensorRef, uses: list[Any] | None = None, *, graph_name: str | None = None
    ) -> TensorRef:
        graph = model.graphs[tensor.graph if graph_name is None else graph_name]
        output = model.output(tensor)
        readers = model.graphs[tensor.graph].consumers(tensor) if uses is None else uses
        name = graph.unique_name(f"{tensor.op}/quant")
        op = Op(
            name=name,
            kind="identity",
            type="Identity",
            outputs=(Output(name, output.dtype, output.shape),),
            rule="test-rule",
        )
        inserted = graph.add_op(op, [tensor])
        graph.reroute(tensor, readers, inserted)
        check_invariants(model, "test")
        return inserted

    return insert
