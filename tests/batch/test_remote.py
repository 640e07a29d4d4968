"""Remote models and outputs, read and written by fsspec's in-memory file system."""

import posixpath
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphquant as gq
from graphquant.batch.manifest import load_entries
from graphquant.batch.run import BatchOptions, run_batch
from graphquant.batch.work import quantize_entry
from graphquant.errors import ManifestError
from graphquant.formats.onnx import file_writer

fsspec = pytest.importorskip("fsspec")

ROOT = Path(__file__).parent.parent.parent
SAMPLES = ROOT / "sample_models"


@pytest.fixture
def zoo():
    """Return an in-memory file system with an ONNX model and a SavedModel at memory://zoo."""
    system = fsspec.filesystem("memory")
    system.put_file(str(SAMPLES / "digits_cnn.onnx"), "/zoo/cnn.onnx")
    for path in (SAMPLES / "digits_rnn_saved_model").rglob("*"):
        if path.is_file():
            system.put_file(str(path), f"/zoo/net/{path.relative_to(SAMPLES / 'digits_rnn_saved_model').as_posix()}")
    yield system
    for name in ("/zoo", "/out"):
        if system.exists(name):
            system.rm(name, recursive=True)


def run_in_process(tmp_path, names, *, force=False, **settings):
    """Run a batch in this process, because others do not see its memory. Return the outcomes."""
    entries = load_entries(names, {"rules": ("weight_only",), **settings})
    options = BatchOptions(folder=tmp_path / "cache", force=force)
    return list(run_batch(entries, options, partial(map, quantize_entry)).outcomes)


def test_remote_models_and_outputs(tmp_path, zoo):
    """Remote outputs equal local ones. Only changed models and outputs are rebuilt."""
    outcomes = run_in_process(tmp_path, ["memory://zoo/*"], output="memory://out/{name}")
    assert [(outcome.model, outcome.output, outcome.status) for outcome in outcomes] == [
        ("memory:///zoo/cnn.onnx", "memory://out/cnn.onnx", "done"),
        ("memory:///zoo/net", "memory://out/net", "done"),
    ]
    gq.insert(SAMPLES / "digits_cnn.onnx", rules="weight_only").save(tmp_path / "cnn.onnx")
    gq.insert(SAMPLES / "digits_rnn_saved_model", rules="weight_only").save(tmp_path / "net")
    assert zoo.cat("/out/cnn.onnx") == (tmp_path / "cnn.onnx").read_bytes()
    files = {path.relative_to(tmp_path).as_posix() for path in (tmp_path / "net").rglob("*") if path.is_file()}
    assert {name: zoo.cat(f"/out/{name}") for name in files} == {name: (tmp_path / name).read_bytes() for name in files}
    assert {name.removeprefix("/out/") for name in zoo.find("/out")} == {*files, "cnn.onnx"}
    rerun = partial(run_in_process, tmp_path, ["memory://zoo/*"], output="memory://out/{name}")
    assert [outcome.status for outcome in rerun()] == ["unchanged", "unchanged"]
    zoo.pipe("/out/cnn.onnx", b"other")
    zoo.pipe("/out/net/variables/stale", b"")
    zoo.pipe("/zoo/net/assets/new.txt", b"new")
    assert [outcome.status for outcome in rerun()] == ["done", "done"]
    assert zoo.cat("/out/cnn.onnx") == (tmp_path / "cnn.onnx").read_bytes()
    assert zoo.cat("/out/net/assets/new.txt") == b"new"
    assert not zoo.exists("/out/net/variables/stale")


def test_unclaimed_remote_outputs(tmp_path, zoo):
    """A remote file that no batch wrote is replaced only with --force."""
    zoo.pipe("/out/cnn.onnx", b"other")
    run_again = partial(run_in_process, tmp_path, ["memory://zoo/cnn.onnx"], output="memory://out/cnn.onnx")
    (outcome,) = run_again()
    assert outcome.problem.message.startswith("memory://out/cnn.onnx exists already, ")
    assert "--force" in outcome.problem.message
    assert zoo.cat("/out/cnn.onnx") == b"other"
    assert run_again(force=True)[0].status == "done"
    assert run_again()[0].status == "unchanged"


def test_remote_models_with_local_outputs(tmp_path, zoo):
    """A remote model has a local output, which the cache restores."""
    run_again = partial(run_in_process, tmp_path, ["memory://zoo/cnn.onnx"], output=str(tmp_path / "out" / "{name}"))
    assert run_again()[0].status == "done"
    (tmp_path / "out" / "cnn.onnx").unlink()
    assert run_again()[0].status == "unchanged"
    assert (tmp_path / "out" / "cnn.onnx").is_file()


def test_external_data(tmp_path, zoo):
    """External data of a remote model is fetched. If it is missing, the message has the model's address."""
    weight = numpy_helper.from_array(np.arange(4096, dtype=np.float32).reshape(64, 64) / 4096, "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 64]) for name in "xy"]
    model = helper.make_model(helper.make_graph([node], "g", tensors[:1], tensors[1:], [weight]))
    onnx.save(model, tmp_path / "big.onnx", save_as_external_data=True, location="big.bin", size_threshold=0)
    zoo.put_file(str(tmp_path / "big.onnx"), "/zoo/big.onnx")
    run_again = partial(run_in_process, tmp_path, ["memory://zoo/big.onnx"], output="memory://out/{name}")
    (outcome,) = run_again()
    assert outcome.status == "failed"
    assert "'big.bin'" in outcome.problem.message
    assert str(tmp_path) not in outcome.problem.message
    zoo.put_file(str(tmp_path / "big.bin"), "/zoo/big.bin")
    assert run_again()[0].status == "done"
    gq.insert(tmp_path / "big.onnx", rules="weight_only").save(tmp_path / "out.onnx")
    assert zoo.cat("/out/big.onnx") == (tmp_path / "out.onnx").read_bytes()
    zoo.pipe("/zoo/big.bin", (tmp_path / "big.bin").read_bytes()[::-1])
    assert run_again()[0].status != "unchanged"


def test_external_weights_of_an_output(tmp_path, zoo, monkeypatch):
    """External weights are written before the model. Old ones are removed unless another model uses them."""
    monkeypatch.setattr(file_writer, "EXTERNALIZE_BYTES", 0)
    model = onnx.load(SAMPLES / "digits_cnn.onnx")
    onnx.save(model, tmp_path / "big.onnx", save_as_external_data=True, location="big.bin")
    for name in ("big.onnx", "big.bin"):
        zoo.put_file(str(tmp_path / name), f"/zoo/{name}")
    written, open_file = [], zoo.open

    def recording_open(path, mode="rb", **more):
        written.extend([posixpath.basename(path)] if "w" in mode else [])
        return open_file(path, mode, **more)

    monkeypatch.setattr(zoo, "open", recording_open)
    data_names = []
    for rules in ("weight_only", "weight_only_int4", "weight_only"):
        written.clear()
        (outcome,) = run_in_process(
            tmp_path, ["memory://zoo/big.onnx"], output="memory://out/{name}", rules=(rules,), force=True
        )
        (data,) = outcome.products.keys() - {"big.onnx"}
        assert (outcome.status, written) == ("done", [data, "big.onnx"])
        data_names.append(data)
        names = {posixpath.basename(name) for name in zoo.find("/out")}
        assert names == {"big.onnx", data, *(("copy.onnx", data_names[0]) if len(data_names) > 1 else ())}
        if len(data_names) == 1:
            zoo.cp_file("/out/big.onnx", "/out/copy.onnx")
    assert data_names[0] == data_names[2] != data_names[1]


def test_failures_name_addresses(tmp_path, zoo):
    """A model that cannot be read or written fails with its address in the message."""
    zoo.pipe("/zoo/broken.onnx", b"\x0a\x03abc")
    outcomes = run_in_process(tmp_path, ["memory://zoo/broken.onnx"], output="memory://out/{name}")
    assert [outcome.status for outcome in outcomes] == ["failed"]
    assert outcomes[0].problem.message.startswith("memory://zoo/broken.onnx: ")
    assert "no graph" in outcomes[0].problem.message
    assert str(tmp_path.parent.parent) not in outcomes[0].problem.message
    outcomes = run_in_process(tmp_path, ["memory://zoo/cnn.onnx"], output="nowhere://out/{name}")
    assert outcomes[0].problem.message.startswith("nowhere://out/cnn.onnx cannot be written: ")
    assert "Protocol not known" in outcomes[0].problem.message
    (entry,) = load_entries(["memory://zoo/cnn.onnx"], {"rules": ("weight_only",)})
    zoo.rm("/zoo/cnn.onnx")
    outcome = quantize_entry(entry)
    assert (outcome.status, outcome.problem.kind) == ("failed", "ModelError")
    assert outcome.problem.message.startswith("memory://zoo/cnn.onnx cannot be read")


def test_addresses_that_need_arguments():
    """An address of a file system that cannot be opened by its name alone is a ManifestError."""
    for address in ("reference://x", "generic://x", "zip://x"):
        with pytest.raises(ManifestError):
            load_entries([address], {})


def test_services_that_fail_in_a_search(monkeypatch):
    """An error of a service while models are searched is a ManifestError, of whatever class it is."""

    def fail(*_arguments, **_options):
        raise RuntimeError("token expired")

    monkeypatch.setattr(fsspec.filesystem("memory"), "isfile", fail)
    with pytest.raises(ManifestError, match="token expired"):
        load_entries(["memory://zoo/a.onnx"], {})


def test_packages_of_services():
    """A missing package of a service is named by the extra of fsspec that has it, not by one of graphquant."""
    from graphquant.calibration.data.files import missing_remote_package
    from graphquant.errors import MissingDependencyError

    for address, extra in (("https://h/a.onnx", "http"), ("zip://*::http://h/a.zip", "http"), ("s3://b/a", "s3")):
        error = missing_remote_package(address, ImportError("needs a package"))
        assert isinstance(error, MissingDependencyError)
        assert f"pip install 'fsspec[{extra}]'" in str(error)
    assert "pip install" not in str(missing_remote_package("root://a", ImportError("needs a package")))


def test_names_outside_the_folder(tmp_path):
    """A remote name that leads out of the model's folder raises ModelError and writes nothing."""
    from graphquant.batch import remote
    from graphquant.errors import ModelError

    (tmp_path / "room").mkdir()
    with pytest.raises(ModelError, match=r"/zoo/net/\.\./\.\./x is outside"):
        remote._fetch_file(fsspec.filesystem("memory"), "/zoo", "net/../../x", tmp_path / "room")
    assert [path.name for path in tmp_path.iterdir()] == ["room"]


def test_file_addresses(tmp_path):
    """file:// addresses are local paths."""
    shutil.copy(SAMPLES / "digits_cnn.onnx", tmp_path / "a.onnx")
    (outcome,) = run_in_process(
        tmp_path, [f"file://{tmp_path}/a.onnx"], output=f"file://{tmp_path}/{{stem}}.quant.onnx"
    )
    assert (outcome.status, Path(outcome.output)) == ("done", tmp_path / "a.quant.onnx")
    assert (tmp_path / "a.quant.onnx").is_file()
