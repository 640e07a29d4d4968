"""Weights in a file beside the model: when they go there, that they come back the same, and that nothing gets lost."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import graphquant as gq
from graphquant.errors import ModelError, UsageError
from graphquant.formats import onnx as format_
from graphquant.formats.onnx import apart, files, run
from graphquant.survey import survey

FEED = {"x": np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 64), "c": np.array(True)}


def model(folder: Path, *, external: bool) -> Path:
    """A model with a product in the main graph, in both branches of an If, and with a weight in a Constant node."""
    rng = np.random.default_rng(0)
    made = {name: rng.standard_normal((64, 64)).astype(np.float32) for name in ("w", "k", "a", "b")}
    made["bias"] = rng.standard_normal(512).astype(np.float32)
    tensors = {name: numpy_helper.from_array(value, name) for name, value in made.items()}
    if external:
        with folder.joinpath("m.data").open("wb") as file:
            for tensor in tensors.values():
                tensor.data_location = onnx.TensorProto.EXTERNAL
                span = (("location", "m.data"), ("offset", file.tell()), ("length", len(tensor.raw_data)))
                file.write(tensor.raw_data)
                tensor.ClearField("raw_data")
                for key, value in span:
                    tensor.external_data.add(key=key, value=str(value))
    branches = {
        f"{branch}_branch": helper.make_graph(
            [helper.make_node("MatMul", ["p", name], [f"o{name}"])],
            branch,
            [],
            [helper.make_tensor_value_info(f"o{name}", 1, [1, 64])],
            [tensors[name]],
        )
        for branch, name in (("then", "a"), ("else", "b"))
    }
    nodes = [
        helper.make_node("Constant", [], ["k"], value=tensors["k"]),
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("MatMul", ["m", "k"], ["p"]),
        helper.make_node("If", ["c"], ["q"], **branches),
        helper.make_node("Expand", ["q", "size"], ["e"]),
        helper.make_node("Reshape", ["e", "flat"], ["f"]),
        helper.make_node("Add", ["f", "bias"], ["y"]),
    ]
    sizes = [numpy_helper.from_array(np.array(v), n) for n, v in (("size", [8, 64]), ("flat", [512]))]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, [1, 64]), helper.make_tensor_value_info("c", 9, [])],
        [helper.make_tensor_value_info("y", 1, [512])],
        [tensors["w"], tensors["bias"], *sizes],
    )
    message = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    path = folder / "m.onnx"
    path.write_bytes(message.SerializeToString())
    return path


def outputs(path: Path) -> Any:
    """What onnxruntime computes with the file."""
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, FEED)[0]


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("rules", ["weight_only", "weight_only_int4"])
def test_same_as_inside(external: bool, rules: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bulky tensors, new or kept, in bodies and Constant nodes too, go to one file; the model computes the same."""
    source = model(tmp_path, external=external)
    result = gq.insert(source, rules=rules)
    result.save(tmp_path / "inside.onnx")
    assert not tmp_path.joinpath("inside.onnx.data").exists()
    monkeypatch.setattr(files, "MANY", 0)
    if not external:
        monkeypatch.setattr(files, "MAX_MESSAGE", 5000)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    made = result.save(elsewhere / "q.onnx")
    assert sorted(path.name for path in elsewhere.iterdir()) == ["q.onnx", "q.onnx.data"]
    assert made.stat().st_size < 5000
    onnx.checker.check_model(str(made), full_check=True)
    np.testing.assert_array_equal(outputs(made), outputs(tmp_path / "inside.onnx"))
    assert [str(one.tensor) for one in survey(gq.load(made)).readings] == [
        str(one.tensor) for one in survey(result.model).readings
    ]
    assert len(result.inserted) == 4


def test_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same input gives the same two files; the bias that stayed float is in the second, at an aligned place."""
    source = model(tmp_path, external=True)
    monkeypatch.setattr(files, "MANY", 0)
    made = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        gq.insert(source, rules="weight_only").save(folder / "q.onnx")
        made.append([folder.joinpath(file).read_bytes() for file in ("q.onnx", "q.onnx.data")])
    assert made[0] == made[1]
    message = onnx.load(tmp_path / "one/q.onnx", load_external_data=False)
    places = {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data} for tensor in message.graph.initializer
    }
    assert places["bias"]["location"] == "q.onnx.data"
    assert int(places["bias"]["offset"]) % 64 == 0
    assert places["size"] == {}  # too small
    assert 4 * 64 * 64 + 2048 <= len(made[0][1]) < 4 * 64 * 64 + 2048 + 4 * 64 * 4 + 10 * 64


def test_other_data_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of data that belongs to no model there, or to the source, is left; one of the output goes with it."""
    source = model(tmp_path, external=True)
    result = gq.insert(source, rules="weight_only")
    monkeypatch.setattr(files, "MANY", 0)
    data = tmp_path / "q.onnx.data"
    data.write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"q\.onnx\.data, where the weights would go, is there already"):
        result.save(tmp_path / "q.onnx")
    assert data.read_bytes() == b"mine"
    data.unlink()
    result.save(tmp_path / "q.onnx")
    first = data.read_bytes()
    result.save(tmp_path / "q.onnx", force=True)
    assert data.read_bytes() == first
    moved = gq.load(tmp_path / "q.onnx")
    taken = tmp_path / "taken.onnx"
    taken.write_bytes(b"")
    tmp_path.joinpath("taken.onnx.data").hardlink_to(tmp_path / "m.data")
    with pytest.raises(UsageError, match="another model's"):
        result.save(taken, force=True)
    assert moved.digest == gq.load(tmp_path / "q.onnx").digest


def test_nothing_or_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk fills while weights are written, what was there before stays, and no part of the new is left."""
    source = model(tmp_path, external=True)
    result = gq.insert(source, rules="weight_only")
    monkeypatch.setattr(files, "MANY", 0)
    result.save(tmp_path / "q.onnx")
    names = sorted(path.name for path in tmp_path.iterdir())
    before = [tmp_path.joinpath(name).read_bytes() for name in names]

    def full(_message: Any, _ops: Any, _folder: Any, file: Any, _location: str) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "put_apart", full)
    with pytest.raises(UsageError, match="cannot be written: No space left on device"):
        result.save(tmp_path / "q.onnx", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [tmp_path.joinpath(name).read_bytes() for name in names] == before


def test_too_large_to_be_a_message(tmp_path: Path) -> None:
    """A file that no protocol buffer can be is refused before it is read."""
    path = tmp_path / "huge.onnx"
    with path.open("wb") as file:
        file.truncate((1 << 31) + 5)
    with pytest.raises(ModelError, match=r"huge\.onnx is over 2 GB.*Save the model with external data"):
        gq.load(path)


def test_run_from_the_mapped_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From some size on onnxruntime makes no second copy of the weights, and computes the same."""
    path = model(tmp_path, external=True)
    key, made = "session.disable_prepacking", []
    for most in (run.MAPPED, 1):
        monkeypatch.setattr(run, "MAPPED", most)
        made.append(run.session(path.read_bytes(), tmp_path, 70_000))
    assert made[1].get_session_options().get_session_config_entry(key) == "1"
    with pytest.raises(RuntimeError, match=key):
        made[0].get_session_options().get_session_config_entry(key)
    np.testing.assert_allclose(made[0].run(None, FEED)[0], made[1].run(None, FEED)[0], rtol=1e-4, atol=1e-2)
    monkeypatch.setattr(run, "MAPPED", 1)
    np.testing.assert_allclose(
        format_.runner(gq.load(path)).run(FEED)["y"], made[0].run(None, FEED)[0], rtol=1e-4, atol=1e-2
    )


def test_memory_is_that_of_one_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen weights of 4 MB are quantized and written in the memory of a few."""
    size, count = 1 << 10, 16
    path, nodes, tensors = tmp_path / "m.onnx", [], []
    with tmp_path.joinpath("m.data").open("wb") as file:
        for k in range(count):
            np.random.default_rng(k).standard_normal((size, size), np.float32).tofile(file)
            tensor = onnx.TensorProto(name=f"w{k}", data_type=1, dims=[size, size], data_location=1)
            for key, value in (("location", "m.data"), ("offset", k * 4 * size**2), ("length", 4 * size**2)):
                tensor.external_data.add(key=key, value=str(value))
            tensors.append(tensor)
            nodes.append(helper.make_node("MatMul", [f"x{k}", f"w{k}"], [f"x{k + 1}"]))
    ends = [[helper.make_tensor_value_info(name, 1, [1, size])] for name in ("x0", f"x{count}")]
    graph = helper.make_graph(nodes, "g", *ends, tensors)
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8).SerializeToString()
    )
    monkeypatch.setattr(files, "MANY", 0)
    gq.insert(path, rules="weight_only")  # modules are imported
    tracemalloc.start()
    try:
        result = gq.insert(path, rules="weight_only")
        result.save(tmp_path / "q.onnx")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(result.inserted) == count
    assert tmp_path.joinpath("q.onnx.data").stat().st_size >= count * size**2
    assert peak < count * size**2  # less than all the integers alone


@pytest.mark.parametrize("unknown", [b"", b"\xf2\x3f\x02hi"])
def test_left_and_filled_again(unknown: bytes, tmp_path: Path) -> None:
    """A message whose weights were left for later and filled in again is the source's, to the byte, notes and all."""
    path = model(tmp_path, external=False)
    source = onnx.load(path)
    source.graph.initializer[0].doc_string, source.doc_string = "of a weight", "of the model"
    source.metadata_props.add(key="a", value="b")
    numbers = helper.make_tensor("numbers", 1, [512], np.arange(512, dtype=np.float32))
    source.graph.initializer.append(numbers)
    source.MergeFromString(unknown)
    bare = onnx.ModelProto()
    left = apart.copied(source, bare)
    assert [tensor.name for tensor in left] == ([] if unknown else ["w", "bias", "numbers"])
    assert bare.ByteSize() < source.ByteSize() - (0 if unknown else 4 * (64 * 64 + 512 + 512)) + 300
    apart.fill(bare, left)
    assert bare.SerializeToString(deterministic=True) == source.SerializeToString(deterministic=True)
