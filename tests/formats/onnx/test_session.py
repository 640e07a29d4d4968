"""Sessions of onnxruntime: errors, and forked processes that try a session."""

from __future__ import annotations

import errno
import gc
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import graphquant as gq
from graphquant.errors import ModelError
from graphquant.formats import onnx as format_
from graphquant.formats.onnx import runtime, session

if TYPE_CHECKING:
    from pathlib import Path

HEAD = '<ir_version: 8, opset_import: ["" : 17]> '
X = np.array([-3, 4], np.float32)


def test_custom_ops_and_missing_data_have_messages(load_text: Any, tmp_path: Path) -> None:
    """The error of a custom op names it with its domain, and the error of missing weights names their file."""
    head = '<ir_version: 8, opset_import: ["" : 17, "com.acme" : 1]> '
    with pytest.raises(ModelError, match=r"com\.acme:Mine.*weight_only"):
        format_.create_runner(load_text(head + "g (float[2] x) => (float[2] y) { y = com.acme.Mine(x) }")).run({"x": X})
    weight = numpy_helper.from_array(np.ones((2, 2), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", 1, [1, 2])],
        [helper.make_tensor_value_info("y", 1, [1, 2])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    tmp_path.joinpath("m.bin").unlink()
    with pytest.raises(ModelError, match=r"'w'.*'m\.bin'"):
        format_.create_runner(gq.load(tmp_path / "m.onnx")).run({"x": X[None]})


class _Unreachable:
    """Part of a reference cycle, which reports where the garbage collector destroys it."""

    def __init__(self, path: Path) -> None:
        self.cycle, self.path, self.process = self, path, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            self.path.touch()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux opens sessions in a forked process")
def test_a_forked_process_collects_no_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that tries a session destroys no other one, whose threads it has not, and would wait for ever."""
    fork = os.fork

    def fork_with_garbage() -> int:
        _Unreachable(tmp_path / "destroyed")
        return fork()

    monkeypatch.setattr(runtime, "_MAY_CRASH", True)
    monkeypatch.setattr(os, "fork", fork_with_garbage)
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(20):
            with pytest.raises(runtime.RUNTIME_ERRORS):
                runtime.open_inference_session(b"", onnxruntime.SessionOptions())
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
    assert not (tmp_path / "destroyed").exists()


@pytest.mark.parametrize(("name", "code"), [("/dev/full", errno.ENOSPC), ("missing/model.onnx", errno.ENOENT)])
def test_a_full_disk_is_no_invalid_model(tmp_path: Path, name: str, code: int) -> None:
    """ONNX Runtime describes an optimized model that it cannot write like a model that is invalid."""
    message = onnx.parser.parse_model(HEAD + "g (float[2] x) => (float[2] y) { y = Relu(x) }")
    mode = session.SessionMode(optimized=tmp_path / name)
    with pytest.raises(OSError) as raised:  # noqa: PT011  # the code is compared
        session.create_session(message.SerializeToString(), None, mode=mode)
    assert raised.value.errno == code
