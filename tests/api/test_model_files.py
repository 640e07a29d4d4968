"""The files of a model."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphquant as gq
from graphquant.api.models import companion_file_names, model_files, omission_notes
from graphquant.errors import ModelError

SAMPLES = Path(__file__).parents[2] / "sample_models"


def _write_external_model(path):
    weight = numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 64])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)


def test_model_files_of_a_single_file():
    """A message without external data has one file."""
    path = SAMPLES / "digits_cnn.onnx"
    assert model_files(path) == (path,)


def test_model_files_with_external_data(tmp_path):
    """The external data file follows the message; a missing one is an error."""
    _write_external_model(tmp_path / "net.onnx")
    assert model_files(tmp_path / "net.onnx") == (tmp_path / "net.onnx", tmp_path / "w.bin")
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, match=r"w\.bin"):
        model_files(tmp_path / "net.onnx")


def test_model_files_of_a_saved_model():
    """All files of the folder are listed, `saved_model.pb` first."""
    folder = SAMPLES / "digits_cnn_saved_model"
    files = model_files(folder)
    assert files[0] == folder / "saved_model.pb"
    assert list(files[1:]) == sorted(path for path in folder.rglob("*") if path.is_file() and path != files[0])


def test_model_files_of_a_meta_graph(tmp_path):
    """The checkpoint of a MetaGraph is listed, without files that only have similar names."""
    for name in ("net.meta", "net.index", "net.data-00000-of-00001", "net.txt", "network.index"):
        shutil.copy(SAMPLES / "digits_cnn.pb", tmp_path / name)
    names = [path.name for path in model_files(tmp_path / "net.meta")]
    assert names == ["net.meta", "net.data-00000-of-00001", "net.index"]
    assert list(companion_file_names(tmp_path / "net.meta", ["net.txt", "net.index", "x.index"])) == ["net.index"]


def test_companion_file_names(tmp_path):
    """Names of external data are listed even if the files are missing; a model without any has none."""
    _write_external_model(tmp_path / "net.onnx")
    (tmp_path / "w.bin").unlink()
    assert companion_file_names(tmp_path / "net.onnx", []) == ("w.bin",)
    assert companion_file_names(SAMPLES / "digits_cnn.onnx", ["w.bin"]) == ()
    assert companion_file_names(SAMPLES / "digits_cnn.pb", ["digits_cnn.index"]) == ()


@pytest.mark.parametrize(("op_type", "count"), [("EPContext", 1), ("FusedConv", 0)])
def test_compiled_program_has_a_note(tmp_path, op_type, count):
    """An op that holds a compiled program is named, because nothing in it can be quantized."""
    node = helper.make_node(op_type, ["x"], ["y"], domain="com.microsoft")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports), tmp_path / "net.onnx")
    notes = omission_notes(gq.load(tmp_path / "net.onnx"))
    assert len(notes) == count
    assert all(op_type in note for note in notes)
