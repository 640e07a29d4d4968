"""Models and outputs that fsspec reads and writes, here in the memory of this process."""

import posixpath
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphquant import api
from graphquant.batch.manifest import load_entries
from graphquant.batch.run import BatchOptions, run_batch
from graphquant.batch.work import quantize_entry
from graphquant.formats.onnx import file_writer

fsspec = pytest.importorskip("fsspec")

ROOT = Path(__file__).parent.parent.parent
SAMPLES = ROOT / "sample_models"


@pytest.fixture
def zoo():
    """A file system in memory with an ONNX model, a SavedModel and a broken file at memory://zoo."""
    system = fsspec.filesystem("memory")
    system.put_file(str(SAMPLES / "digits_cnn.onnx"), "/zoo/cnn.onnx")
    for path in (SAMPLES / "digits_rnn_saved_model").rglob("*"):
        if path.is_file():
            system.put_file(str(path), f"/zoo/net/{path.relative_to(SAMPLES / 'digits_rnn_saved_model').as_posix()}")
    yield system
    for name in ("/zoo", "/out"):
        if system.exists(name):
            system.rm(name, recursive=True)


def run(tmp_path, names, *, force=False, **given):
    """Runs a batch in this process, since no other sees this memory; gives the outcomes."""
    asked = load_entries(names, {"rules": ("weight_only",), **given})
    options = BatchOptions(folder=tmp_path / "cache", force=force)
    return list(run_batch(asked, options, partial(map, quantize_entry)).outcomes)


def test_remote_models_and_outputs(tmp_path, zoo):
    """What is written is what a file would become; again nothing is done; a changed model or output is made anew."""
    found = run(tmp_path, ["memory://zoo/*"], output="memory://out/{name}")
    assert [(one.model, one.output, one.status) for one in found] == [
        ("memory:///zoo/cnn.onnx", "memory://out/cnn.onnx", "done"),
        ("memory:///zoo/net", "memory://out/net", "done"),
    ]
    api.insert(SAMPLES / "digits_cnn.onnx", rules="weight_only").save(tmp_path / "cnn.onnx")
    api.insert(SAMPLES / "digits_rnn_saved_model", rules="weight_only").save(tmp_path / "net")
    assert zoo.cat("/out/cnn.onnx") == (tmp_path / "cnn.onnx").read_bytes()
    files = {path.relative_to(tmp_path).as_posix() for path in (tmp_path / "net").rglob("*") if path.is_file()}
    assert {name: zoo.cat(f"/out/{name}") for name in files} == {name: (tmp_path / name).read_bytes() for name in files}
    assert {name.removeprefix("/out/") for name in zoo.find("/out")} == {*files, "cnn.onnx"}
    again = partial(run, tmp_path, ["memory://zoo/*"], output="memory://out/{name}")
    assert [one.status for one in again()] == ["unchanged", "unchanged"]
    zoo.pipe("/out/cnn.onnx", b"other")
    zoo.pipe("/out/net/variables/stale", b"")
    zoo.pipe("/zoo/net/assets/new.txt", b"new")
    assert [one.status for one in again()] == ["done", "done"]
    assert zoo.cat("/out/cnn.onnx") == (tmp_path / "cnn.onnx").read_bytes()
    assert zoo.cat("/out/net/assets/new.txt") == b"new"
    assert not zoo.exists("/out/net/variables/stale")


def test_unclaimed_remote_outputs(tmp_path, zoo):
    """What somebody else put at an output is not replaced, unless that is asked for."""
    zoo.pipe("/out/cnn.onnx", b"other")
    asked = partial(run, tmp_path, ["memory://zoo/cnn.onnx"], output="memory://out/cnn.onnx")
    (one,) = asked()
    assert one.problem.message.startswith("memory://out/cnn.onnx exists already, and was not created by a batch.")
    assert zoo.cat("/out/cnn.onnx") == b"other"
    assert asked(force=True)[0].status == "done"
    assert asked()[0].status == "unchanged"


def test_remote_models_with_local_outputs(tmp_path, zoo):
    """A model from elsewhere can be written here, with the cache."""
    asked = partial(run, tmp_path, ["memory://zoo/cnn.onnx"], output=str(tmp_path / "out" / "{name}"))
    assert asked()[0].status == "done"
    (tmp_path / "out" / "cnn.onnx").unlink()
    assert asked()[0].status == "unchanged"
    assert (tmp_path / "out" / "cnn.onnx").is_file()


def test_external_data(tmp_path, zoo):
    """A model's external data comes along; where it is missing, that is told by the model's address."""
    weight = numpy_helper.from_array(np.arange(4096, dtype=np.float32).reshape(64, 64) / 4096, "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 64]) for name in "xy"]
    model = helper.make_model(helper.make_graph([node], "g", tensors[:1], tensors[1:], [weight]))
    onnx.save(model, tmp_path / "big.onnx", save_as_external_data=True, location="big.bin", size_threshold=0)
    zoo.put_file(str(tmp_path / "big.onnx"), "/zoo/big.onnx")
    asked = partial(run, tmp_path, ["memory://zoo/big.onnx"], output="memory://out/{name}")
    (one,) = asked()
    assert one.status == "failed"
    assert "'big.bin'" in one.problem.message
    assert str(tmp_path) not in one.problem.message
    zoo.put_file(str(tmp_path / "big.bin"), "/zoo/big.bin")
    assert asked()[0].status == "done"
    api.insert(tmp_path / "big.onnx", rules="weight_only").save(tmp_path / "out.onnx")
    assert zoo.cat("/out/big.onnx") == (tmp_path / "out.onnx").read_bytes()
    zoo.pipe("/zoo/big.bin", (tmp_path / "big.bin").read_bytes()[::-1])
    assert asked()[0].status != "unchanged"


def test_external_weights_of_an_output(tmp_path, zoo, monkeypatch):
    """They are written before the model; those of the model before go, but not what a copy of it reads."""
    monkeypatch.setattr(file_writer, "EXTERNALIZE_BYTES", 0)
    model = onnx.load(SAMPLES / "digits_cnn.onnx")
    onnx.save(model, tmp_path / "big.onnx", save_as_external_data=True, location="big.bin")
    for name in ("big.onnx", "big.bin"):
        zoo.put_file(str(tmp_path / name), f"/zoo/{name}")
    opened, ordinary = [], zoo.open

    def noted(path, mode="rb", **more):
        opened.extend([posixpath.basename(path)] if "w" in mode else [])
        return ordinary(path, mode, **more)

    monkeypatch.setattr(zoo, "open", noted)
    made = []
    for rules in ("weight_only", "weight_only_int4", "weight_only"):
        opened.clear()
        (one,) = run(tmp_path, ["memory://zoo/big.onnx"], output="memory://out/{name}", rules=(rules,), force=True)
        (data,) = one.products.keys() - {"big.onnx"}
        assert (one.status, opened) == ("done", [data, "big.onnx"])
        made.append(data)
        there = {posixpath.basename(name) for name in zoo.find("/out")}
        assert there == {"big.onnx", data, *(("copy.onnx", made[0]) if len(made) > 1 else ())}
        if len(made) == 1:
            zoo.cp_file("/out/big.onnx", "/out/copy.onnx")
    assert made[0] == made[2] != made[1]


def test_failures_name_addresses(tmp_path, zoo):
    """What cannot be read or written is the model's own failure, and told by its address."""
    zoo.pipe("/zoo/broken.onnx", b"\x0a\x03abc")
    found = run(tmp_path, ["memory://zoo/broken.onnx"], output="memory://out/{name}")
    assert [one.status for one in found] == ["failed"]
    assert found[0].problem.message.startswith("memory://zoo/broken.onnx: The model has no graph.")
    assert str(tmp_path.parent.parent) not in found[0].problem.message
    found = run(tmp_path, ["memory://zoo/cnn.onnx"], output="nowhere://out/{name}")
    assert found[0].problem.message.startswith("nowhere://out/cnn.onnx cannot be written: Protocol not known: nowhere")
    (asked,) = load_entries(["memory://zoo/cnn.onnx"], {"rules": ("weight_only",)})
    zoo.rm("/zoo/cnn.onnx")
    outcome = quantize_entry(asked)
    assert (outcome.status, outcome.problem.kind) == ("failed", "ModelError")
    assert outcome.problem.message.startswith("memory://zoo/cnn.onnx cannot be read")


def test_names_outside_the_folder(tmp_path):
    """A service whose names lead out of the folder does not get files written there."""
    from graphquant.batch import remote
    from graphquant.errors import ModelError

    (tmp_path / "room").mkdir()
    with pytest.raises(ModelError, match="outside of the model's folder"):
        remote._fetch_file(fsspec.filesystem("memory"), "/zoo", "net/../../x", tmp_path / "room")
    assert [path.name for path in tmp_path.iterdir()] == ["room"]


def test_file_addresses(tmp_path):
    """file:// is this machine."""
    shutil.copy(SAMPLES / "digits_cnn.onnx", tmp_path / "a.onnx")
    (one,) = run(tmp_path, [f"file://{tmp_path}/a.onnx"], output=f"file://{tmp_path}/{{stem}}.quant.onnx")
    assert (one.status, Path(one.output)) == ("done", tmp_path / "a.quant.onnx")
    assert (tmp_path / "a.quant.onnx").is_file()
