"""The models of onnx's backend test suite, sample models and real models survive a round trip unchanged."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from support.shared_models import SHARED_MODELS
from support.stand_ins import ONNX_STAND_INS

from graphquant.errors import ModelError
from graphquant.formats import onnx as format_
from graphquant.formats.onnx.reader import model_from_message
from graphquant.ir import check_invariants

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
STORED = Path(onnx.__file__).parent / "backend/test/data"
SAMPLES = sorted(path for path in (ROOT / "sample_models").glob("*.onnx") if ".quant" not in path.suffixes)
REAL = sorted(SHARED_MODELS.rglob("*.onnx"))


def generated() -> Iterator[onnx.ModelProto]:
    """Yield the models of onnx's case generator."""
    with warnings.catch_warnings(action="ignore"):
        from onnx.backend.test.case.node import collect_testcases

        yield from (case.model for case in collect_testcases(None) if case.model is not None)


def test_stored_backend_models_come_back_byte_identical(tmp_path: Path) -> None:
    """Every stored model of the backend suite is saved byte for byte."""
    paths = sorted(STORED.rglob("*.onnx"))
    assert len(paths) > 100
    changed = []
    for path in paths:
        model = format_.load(path)
        check_invariants(model, "load")
        format_.save(model, tmp_path / "out.onnx")
        if (tmp_path / "out.onnx").read_bytes() != path.read_bytes():
            changed.append(path)
    assert changed == []


@pytest.mark.slow
def test_generated_backend_models_come_back_equal() -> None:
    """Every model of the case generator loads, passes the checks and is emitted as an equal message."""
    count = 0
    for message in generated():
        model = model_from_message(message)
        check_invariants(model, "load")
        assert format_.emit(model) == message
        count += 1
    assert count > 1500


@pytest.mark.parametrize("path", [*SAMPLES, *ONNX_STAND_INS, *REAL], ids=lambda path: path.name)
def test_real_models_come_back_byte_identical(path: Path, stand_ins: Path, tmp_path: Path) -> None:
    """Sample and real models, and copies of them, are saved byte for byte."""
    path = stand_ins / path  # an absolute path remains
    model = format_.load(path).copy()
    check_invariants(model, "load")
    assert format_.emit(model) == model.source.message
    format_.save(model, tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("suffix", [".textproto", ".json"])
def test_text_forms_come_back_equal(suffix: str, tmp_path: Path) -> None:
    """A model written in a text form is read back as the same message."""
    model = format_.load(ROOT / "sample_models/digits_rnn.onnx")
    format_.save(model, tmp_path / f"model{suffix}")
    again = format_.load(tmp_path / f"model{suffix}")
    assert again.source.message == model.source.message
    assert list(again.main.nx) == list(model.main.nx)


def test_textual_form_holds_graph_and_weights(tmp_path: Path) -> None:
    """Onnx's own textual form is read with the same ops and weights, and is refused if onnx rounds floats in it."""
    model = format_.load(ROOT / "sample_models/digits_rnn.onnx")
    third = onnx.helper.make_tensor("third", onnx.TensorProto.FLOAT, [1], [1 / 3])
    text = onnx.printer.to_text(onnx.helper.make_graph([], "g", [], [], [third]))
    if onnx.parser.parse_graph(text).initializer[0].float_data != third.float_data:  # onnx 1.22 writes six digits
        with pytest.raises(ModelError):
            format_.save(model, tmp_path / "model.onnxtxt")
        assert not list(tmp_path.iterdir())
        return
    format_.save(model, tmp_path / "model.onnxtxt")
    again = format_.load(tmp_path / "model.onnxtxt")
    assert list(again.main.nx) == list(model.main.nx)
    for op in model.main.ops():
        reparsed = again.main.op(op.name)
        assert (reparsed.type, reparsed.kind, again.main.slots(op.name)) == (
            op.type,
            op.kind,
            model.main.slots(op.name),
        )
        if op.read_value is not None and reparsed.read_value is not None:
            np.testing.assert_array_equal(reparsed.read_value(), op.read_value())
