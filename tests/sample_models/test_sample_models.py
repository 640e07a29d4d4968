"""Tests of the committed sample models: presence, size, structure, accuracy and agreement between formats."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODELS = Path(__file__).resolve().parents[2] / "sample_models"
NAMES = ("digits_cnn", "digits_rnn")
SHAPES = {"digits_cnn": (8, 8, 1), "digits_rnn": (8, 8), "digits_nested": (8, 8, 1), "digits_resnet": (1, 32, 32)}
ACCURACIES = {
    "digits_cnn.onnx": 0.9867,
    "digits_cnn_bn.onnx": 0.9867,
    "digits_rnn.onnx": 0.9833,
    "digits_nested.onnx": 0.9733,
    "digits_resnet.onnx": 0.9933,
}
ONE_SAMPLE = 1 / 300
FILES = [
    "README.md",
    "build.py",
    "digits_cnn.pbtxt",
    "digits_cnn_bn.onnx",
    "nested.py",
    "digits_nested.onnx",
    "digits_nested_calib.npz",
    "digits_nested_eval.npz",
    "resnet.py",
    "digits_resnet.onnx",
    "digits_resnet_calib.npz",
    "digits_resnet_eval.npz",
    *(
        f"{name}{suffix}"
        for name in NAMES
        for suffix in (
            ".pb",
            ".onnx",
            "_calib.npz",
            "_eval.npz",
            "_saved_model/saved_model.pb",
            "_saved_model/variables/variables.index",
            "_saved_model/variables/variables.data-00000-of-00001",
        )
    ),
]

Array = np.ndarray[Any, Any]


def evaluation_data(name: str) -> tuple[Array, Array]:
    """Return the images and labels of the evaluation file that belongs to a model or to one of its variants."""
    data = np.load(MODELS / f"{name.removesuffix('_bn')}_eval.npz")
    return data["image"], data["labels"]


def dark_and_bright(images: Array) -> tuple[Array, Array]:
    """Return the fifty darkest and the fifty brightest images."""
    order = np.argsort(images.reshape(len(images), -1).mean(axis=1), kind="stable")
    return images[order[:50]], images[order[-50:]]


def onnx_runner(path: Path) -> Callable[[Array], Array]:
    """Return a function running the ONNX model at the path."""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda image: np.asarray(session.run(["probabilities"], {"image": image})[0])


def graph_def_runner(path: Path) -> Callable[[Array], Array]:
    """Return a function running the frozen GraphDef at the path, in binary or text form."""
    tf = pytest.importorskip("tensorflow")
    graph_def = tf.compat.v1.GraphDef()
    if path.suffix == ".pbtxt":
        text_format = pytest.importorskip("google.protobuf.text_format")
        text_format.Parse(path.read_text(encoding="utf-8"), graph_def)
    else:
        graph_def.ParseFromString(path.read_bytes())
    wrapped = tf.compat.v1.wrap_function(lambda: tf.import_graph_def(graph_def, name=""), [])
    function = wrapped.prune("image:0", "probabilities:0")
    return lambda image: np.asarray(function(tf.constant(image)))


def saved_model_runner(path: Path) -> Callable[[Array], Array]:
    """Return a function running the default signature of the SavedModel at the path."""
    tf = pytest.importorskip("tensorflow")
    loaded = tf.saved_model.load(str(path))
    return lambda image: np.asarray(loaded.signatures["serving_default"](image=tf.constant(image))["probabilities"])


def onnx_graphs(graph: Any) -> Iterator[Any]:
    """Yield the graph and all graphs nested in its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from onnx_graphs(attribute.g)


@pytest.mark.parametrize("name", FILES)
def test_file_exists(name: str) -> None:
    """Every listed sample file is present and not empty."""
    assert (MODELS / name).stat().st_size > 0


def test_total_size() -> None:
    """All sample files together stay below three megabytes."""
    caches = ("__pycache__", ".mypy_cache", ".ruff_cache")
    paths = [path for path in MODELS.rglob("*") if path.is_file() and not set(caches) & set(path.parts)]
    assert sum(path.stat().st_size for path in paths) < 3_000_000


@pytest.mark.parametrize("name", SHAPES)
def test_data_files(name: str) -> None:
    """The calibration and evaluation arrays have the stated keys, types, shapes and value range."""
    calibration = np.load(MODELS / f"{name}_calib.npz")
    evaluation = np.load(MODELS / f"{name}_eval.npz")
    assert calibration.files == ["image"]
    assert sorted(evaluation.files) == ["image", "labels"]
    assert calibration["image"].shape == (100, *SHAPES[name])
    assert evaluation["image"].shape == (300, *SHAPES[name])
    assert evaluation["labels"].shape == (300,)
    for images in (calibration["image"], evaluation["image"]):
        assert images.dtype == np.float32
        assert images.min() == 0.0
        assert images.max() == 1.0


@pytest.mark.parametrize("name", ACCURACIES)
def test_onnx_is_valid(name: str) -> None:
    """Every ONNX model passes the full check and has a free batch dimension on `image` and `probabilities`."""
    onnx = pytest.importorskip("onnx")
    model = onnx.load(MODELS / name)
    onnx.checker.check_model(model, full_check=True)
    initialized = {item.name for item in model.graph.initializer}
    values = [item for item in model.graph.input if item.name not in initialized] + list(model.graph.output)
    assert [item.name for item in values] == ["image", "probabilities"]
    assert [item.type.tensor_type.shape.dim[0].dim_param for item in values] == ["batch", "batch"]


@pytest.mark.parametrize(("name", "accuracy"), ACCURACIES.items())
def test_onnx_accuracy(name: str, accuracy: float) -> None:
    """Every ONNX model reaches its stated accuracy, give or take one sample."""
    images, labels = evaluation_data(name.removesuffix(".onnx"))
    predictions = onnx_runner(MODELS / name)(images).argmax(axis=1)
    assert np.mean(predictions == labels) == pytest.approx(accuracy, abs=1.01 * ONE_SAMPLE)


def test_resnet_in_int8(tmp_path: Path) -> None:
    """The residual network takes less than a third of its bytes in int8, runs on integers, and keeps its classes."""
    gq = pytest.importorskip("graphquant")
    images, labels = evaluation_data("digits_resnet")
    result = gq.insert(MODELS / "digits_resnet.onnx", data=np.load(MODELS / "digits_resnet_calib.npz")["image"])
    assert result.quantized_share == 1.0
    validation = gq.compare(MODELS / "digits_resnet.onnx", result.model, data={"image": images, "labels": labels})
    accuracy_float, accuracy_int8 = validation.outputs[0].accuracy
    assert accuracy_int8 >= accuracy_float - 1.01 * ONE_SAMPLE
    assert validation.outputs[0].sqnr > 35
    saved = result.save(tmp_path / "int8.onnx")
    assert 3 * saved.stat().st_size < (MODELS / "digits_resnet.onnx").stat().st_size


def test_onnx_control_flow() -> None:
    """The recurrent ONNX model holds a loop and a branch whose bodies multiply by constant matrices."""
    onnx = pytest.importorskip("onnx")
    graphs = list(onnx_graphs(onnx.load(MODELS / "digits_rnn.onnx").graph))
    counts = [Counter(node.op_type for node in graph.node) for graph in graphs]
    assert counts[0]["Loop"] == counts[0]["If"] == 1
    assert sorted(count["MatMul"] for count in counts[1:]) == [1, 1, 4]
    constants = {item.name for graph in graphs for item in graph.initializer}
    products = [node for graph in graphs[1:] for node in graph.node if node.op_type == "MatMul"]
    assert all(node.input[1] in constants for node in products)


def test_onnx_bodies() -> None:
    """The nested ONNX model convolves and multiplies by a matrix in each body and in its function, which it calls."""
    onnx = pytest.importorskip("onnx")
    model = onnx.load(MODELS / "digits_nested.onnx")
    types = Counter(node.op_type for node in model.graph.node)
    assert (types["Loop"], types["Scan"], types["If"], types["Block"]) == (1, 1, 1, 2)
    bodies = [*list(onnx_graphs(model.graph))[1:], *model.functions]
    assert len(bodies) == 5
    for body in bodies:
        count = Counter(node.op_type for node in body.node)
        assert count["Conv"] == 1
        assert count["MatMul"] == (2 if body.name == "row" else 1)


def test_old_onnx_style() -> None:
    """The hand-written ONNX model keeps its batch norms and lists its initializers among its inputs."""
    onnx = pytest.importorskip("onnx")
    model = onnx.load(MODELS / "digits_cnn_bn.onnx")
    assert (model.ir_version, model.opset_import[0].version) == (3, 9)
    assert sum(node.op_type == "BatchNormalization" for node in model.graph.node) == 5
    assert {item.name for item in model.graph.initializer} < {item.name for item in model.graph.input}


def test_onnx_variants_agree() -> None:
    """The converted and the hand-written ONNX forms of the CNN give the same probabilities."""
    images, _ = evaluation_data("digits_cnn")
    expected = onnx_runner(MODELS / "digits_cnn.onnx")(images)
    np.testing.assert_allclose(onnx_runner(MODELS / "digits_cnn_bn.onnx")(images), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits_cnn.pb", "digits_cnn.pbtxt", "digits_rnn.pb"])
def test_graph_def_agrees(name: str) -> None:
    """Every frozen GraphDef gives the probabilities of the ONNX model, through both branches."""
    run = graph_def_runner(MODELS / name)
    expected = onnx_runner((MODELS / name).with_suffix(".onnx"))
    images, _ = evaluation_data(Path(name).stem)
    for part in (images, *dark_and_bright(images)):
        np.testing.assert_allclose(run(part), expected(part), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_saved_model_agrees(name: str) -> None:
    """Every SavedModel gives the probabilities of the ONNX model, through both branches."""
    run = saved_model_runner(MODELS / f"{name}_saved_model")
    expected = onnx_runner(MODELS / f"{name}.onnx")
    images, _ = evaluation_data(name)
    for part in (images, *dark_and_bright(images)):
        np.testing.assert_allclose(run(part), expected(part), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_graph_def_control_flow() -> None:
    """The frozen recurrent GraphDef keeps a while loop and a branch as functions that multiply matrices."""
    tf = pytest.importorskip("tensorflow")
    graph_def = tf.compat.v1.GraphDef.FromString((MODELS / "digits_rnn.pb").read_bytes())
    operations = Counter(node.op for node in graph_def.node)
    assert operations["While"] == operations["If"] == 1
    functions = [Counter(node.op for node in function.node_def) for function in graph_def.library.function]
    assert sorted(count["MatMul"] for count in functions) == [0, 1, 1, 4]
