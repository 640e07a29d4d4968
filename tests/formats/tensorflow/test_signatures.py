"""Signatures of SavedModels: several that share data or have their own, MetaGraphs, sparse and ragged inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli import run_cli
from support.data_files import encode_example, write_tfrecord
from support.measurements import sqnr_db
from support.tensorflow_models import CLASSES, IMAGE_SIZE, TEXT_SIZE, write_signature_models

import graphquant as gq
from graphquant.calibration.data import open_data, split_by_signature
from graphquant.errors import DataError, ModelError, UsageError
from graphquant.formats import InputSpec
from graphquant.formats.tensorflow import input_specs
from graphquant.formats.tensorflow.runner import create_runner, output_fetches
from graphquant.formats.tensorflow.signatures import FedTensors

SAMPLES = 40


@pytest.fixture(scope="module")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the models of `write_signature_models`."""
    pytest.importorskip("tensorflow")
    folder = tmp_path_factory.mktemp("models")
    write_signature_models(folder)
    return folder


@pytest.fixture
def texts() -> np.ndarray[Any, Any]:
    """Samples for the text inputs, float32 (SAMPLES, TEXT_SIZE)."""
    return np.random.default_rng(1).uniform(-1, 1, size=(SAMPLES, TEXT_SIZE)).astype(np.float32)


@pytest.fixture
def images() -> np.ndarray[Any, Any]:
    """Samples for the image inputs, of other ranges: float32 (SAMPLES // 2, IMAGE_SIZE)."""
    return np.random.default_rng(2).uniform(0, 9, size=(SAMPLES // 2, IMAGE_SIZE)).astype(np.float32)


def quantized_ops(model: gq.Model) -> set[str]:
    """Return the graphs with quantization ops, without the numbers of their traces."""
    return {graph.name for graph, op in model.reachable_ops() if op.kind == "qdq"}


@pytest.mark.slow
def test_signatures_that_share_data_run_on_it(saved_models: Path, texts: Any) -> None:
    """One array feeds both signatures; the outputs of the second one have its name."""
    model = gq.load(saved_models / "shared")
    assert [spec.aliases[-1] for spec in input_specs(model)] == ["x"]
    assert list(output_fetches(model)) == ["scores", "hidden/hidden"]
    result = gq.insert(model, data={"x": texts})
    assert not [skip for skip in result.skips if skip.code == "no-data"]
    assert result.validation is not None
    assert {output.name for output in result.validation.comparison.outputs} == {"scores", "hidden/hidden"}
    assert len(quantized_ops(result.model)) == len(output_fetches(model))


@pytest.mark.slow
def test_a_selected_signature_alone_is_quantized_and_runs(saved_models: Path, texts: Any, tmp_path: Path) -> None:
    """The graphs that only the other signature calls stay as they are, and it still runs."""
    tf = pytest.importorskip("tensorflow")
    result = gq.insert(saved_models / "towers", data={"x": texts}, signature="text")
    model = gq.load(result.save(tmp_path / "quantized"))
    assert list(output_fetches(result.model)) == ["scores"]
    loaded, original = (tf.saved_model.load(str(path)) for path in (tmp_path / "quantized", saved_models / "towers"))
    image = tf.ones([2, IMAGE_SIZE])
    outputs = [net.signatures["image"](x=image)["scores"].numpy() for net in (loaded, original)]
    np.testing.assert_array_equal(*outputs)
    text = tf.constant(texts[:2])
    outputs = [net.signatures["text"](x=text)["scores"].numpy() for net in (loaded, original)]
    assert not np.array_equal(*outputs)
    assert len(quantized_ops(model)) == 1


@pytest.mark.slow
def test_each_signature_has_data_of_its_own(saved_models: Path, texts: Any, images: Any, tmp_path: Path) -> None:
    """`NAME=SPEC` for each signature calibrates all of them, on the command line and in Python."""
    np.savez(tmp_path / "texts.npz", x=texts)
    np.savez(tmp_path / "images.npz", x=images)
    spec = f"text={tmp_path}/texts.npz,image={tmp_path}/images.npz"
    result = gq.insert(saved_models / "towers", data=spec)
    in_memory = gq.insert(saved_models / "towers", data={"text": {"x": texts}, "image": {"x": images}})
    ranges = [{str(pair.site.tensor): repr(pair.params) for pair in each.inserted} for each in (result, in_memory)]
    assert ranges[0] == ranges[1]
    assert len(ranges[0]) > len(quantized_ops(result.model))
    assert list(output_fetches(result.model)) == ["scores", "image/scores"]
    stats = gq.calibrate(saved_models / "towers", data=spec)
    assert stats.samples == SAMPLES
    run_cli("data", "check", saved_models / "towers", spec)
    written = result.save(tmp_path / "quantized")
    comparison = gq.compare(saved_models / "towers", written, spec)
    assert [output.name for output in comparison.outputs] == ["scores", "image/scores"]
    assert min(output.sqnr or 0 for output in comparison.outputs) > 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("rules", "dtype"), [("tflite", "int8"), ("tflite16", "int16")])
def test_signatures_with_other_inputs_share_a_tflite_file(
    saved_models: Path, texts: Any, images: Any, tmp_path: Path, rules: str, dtype: str
) -> None:
    """Each signature has its integer input `x`, its ranges, its line in the validation, and its runner."""
    tf = pytest.importorskip("tensorflow")
    samples = {"text": texts, "image": images}
    for name, array in samples.items():
        np.savez(tmp_path / f"{name}.npz", x=array)
    spec, path = ",".join(f"{name}={tmp_path}/{name}.npz" for name in samples), tmp_path / "towers.tflite"
    arguments = ("insert", saved_models / "towers", "--data", spec, "--rules", rules, "--report", tmp_path / "r.json")
    run_cli(*arguments, "-o", path)
    conversion = json.loads((tmp_path / "r.json").read_text())["conversion"]
    assert conversion["agrees"]
    assert conversion["float_ops"] == []
    loaded, interpreter = tf.saved_model.load(str(saved_models / "towers")), tf.lite.Interpreter(str(path))
    assert interpreter.get_signature_list().keys() == samples.keys()
    scales = set()
    for name, array in samples.items():
        run = interpreter.get_signature_runner(name)
        (source,), (target,) = run.get_input_details().values(), run.get_output_details().values()
        assert {source["dtype"], target["dtype"]} == {np.dtype(dtype).type}
        (scale, zero), (step, offset) = source["quantization"], target["quantization"]
        scales.add(scale)
        integers = np.clip(np.round(array / scale) + zero, np.iinfo(dtype).min, np.iinfo(dtype).max).astype(dtype)
        results = (run(x=integers)["scores"].astype(np.float64) - offset) * step
        assert sqnr_db(loaded.signatures[name](x=tf.constant(array))["scores"].numpy(), results) > 30
    assert len(scales) == len(samples)
    comparison = gq.compare(saved_models / "towers", path, spec)
    assert [output.name for output in comparison.outputs] == ["scores", "image/scores"]
    assert min(output.sqnr or 0 for output in comparison.outputs) > 30
    assert gq.compare(path, path, spec).outputs[0].equal


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_signatures_of_one_tflite_file_have_data_of_their_own(saved_models: Path, texts: Any, tmp_path: Path) -> None:
    """Inputs of one key, type and shape stay apart with data for each; a signature that TFLite cannot run is named."""
    tf = pytest.importorskip("tensorflow")
    np.savez(tmp_path / "texts.npz", x=texts)
    np.savez(tmp_path / "wide.npz", x=8 * texts)
    spec, path = f"serving_default={tmp_path}/texts.npz,hidden={tmp_path}/wide.npz", tmp_path / "shared.tflite"
    run_cli("insert", saved_models / "shared", "--data", spec, "-o", path)
    interpreter = tf.lite.Interpreter(str(path))
    runs = [interpreter.get_signature_runner(name) for name in ("serving_default", "hidden")]
    narrow, wide = (run.get_input_details()["x"]["quantization"][0] for run in runs)
    assert wide / narrow == pytest.approx(8, rel=0.01)
    frozen = gq.freeze(gq.load(saved_models / "shared", signature=["serving_default", "hidden"]))
    assert gq.insert(frozen, data={"x": texts}, signature=["hidden", "serving_default"]).inserted
    for data in (spec, f"hidden={tmp_path}/texts.npz"):
        with pytest.raises(UsageError, match="was frozen with the signatures serving_default, hidden"):
            gq.insert(frozen, data=data)
    module = tf.Module()
    module.double = tf.function(lambda x: {"y": 2 * x}, input_signature=[tf.TensorSpec((None, TEXT_SIZE), name="x")])
    module.count = tf.function(
        lambda text: {"n": tf.strings.length(text)}, input_signature=[tf.TensorSpec((None,), tf.string, "text")]
    )
    tf.saved_model.save(module, str(tmp_path / "net"), signatures={"double": module.double, "count": module.count})
    np.savez(tmp_path / "words.npz", text=np.array(["one", "two"]))
    arguments = ("insert", tmp_path / "net", "--data", f"double={tmp_path}/texts.npz,count={tmp_path}/words.npz")
    outcome = run_cli(*arguments, "-o", tmp_path / "net.tflite", code=ModelError.exit_code)
    assert "the signature count" in outcome.stderr
    assert not (tmp_path / "net.tflite").exists()
    outcome = run_cli("insert", tmp_path / "net", "--data", tmp_path / "texts.npz", "--signature", "double", "-o", path,
                      "--force")  # fmt: skip
    assert "Written to" in outcome.stdout


@pytest.mark.slow
def test_refused_signatures_data_and_tags(saved_models: Path, texts: Any, tmp_path: Path) -> None:
    """Unknown names, data for others than the selected signatures and other formats are errors before any run."""
    np.savez(tmp_path / "texts.npz", x=texts)
    model, spec = saved_models / "towers", f"text={tmp_path}/texts.npz"
    with pytest.raises(UsageError, match="'image', 'text'"):
        gq.load(model, signature="txt")
    with pytest.raises(UsageError, match="serve"):
        gq.load(model, tags="serve,gpu")
    with pytest.raises(UsageError, match="image"):
        gq.insert(model, data=spec, signature=["image"])
    with pytest.raises(UsageError, match="no signature 'txt'"):
        gq.insert(model, data=f"txt={tmp_path}/texts.npz")
    with pytest.raises(UsageError, match="not a SavedModel"):
        gq.load("sample_models/digits_cnn.onnx", signature="text")
    with pytest.raises(UsageError, match="not a SavedModel"):
        gq.load("sample_models/digits_cnn.pb", tags="serve")
    with pytest.raises(DataError, match="twice"):
        split_by_signature("text=a.npz,text=b.npz")
    run_cli("plan", model, "--signature", "txt", code=UsageError.exit_code)


@pytest.mark.parametrize("name", ["sparse", "flattened"])
@pytest.mark.slow
def test_sparse_and_ragged_inputs_take_dense_arrays(name: str, saved_models: Path, texts: Any, tmp_path: Path) -> None:
    """Zeros are the missing values, in both ways in which TensorFlow saves sparse inputs."""
    model, values = gq.load(saved_models / name), np.where(texts > 0, texts, 0).astype(np.float32)
    data = {"sp": values} | ({"rows": texts} if name == "sparse" else {})
    assert {spec.aliases[-1] for spec in input_specs(model)} == data.keys()
    result = gq.insert(model, data=data)
    assert result.validation is not None
    assert result.validation.worst_sqnr is not None
    assert result.validation.worst_sqnr > 20
    assert gq.load(result.save(tmp_path / "quantized")).main.outputs == model.main.outputs
    outputs = create_runner(model).run(data)
    if name == "sparse":
        kernel = next(op for op in model.main.ops() if op.type == "VarHandleOp").read_value()
        np.testing.assert_allclose(outputs["y"], values @ kernel, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(outputs["z"], texts @ kernel, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_flattened_ragged_inputs_take_rows_of_any_length(saved_models: Path, texts: Any, tmp_path: Path) -> None:
    """The values and the row splits are one input, and samples may have rows of different lengths."""
    tf = pytest.importorskip("tensorflow")
    model = gq.load(saved_models / "ragged")
    assert [(spec.aliases, spec.shape) for spec in input_specs(model)] == [(("rows",), (None, None))]
    rows = [{"rows": text[None, : 2 + index % 5]} for index, text in enumerate(texts)]
    padded = np.concatenate([np.pad(row["rows"], [(0, 0), (0, TEXT_SIZE - row["rows"].shape[1])]) for row in rows])
    runner, dense = create_runner(model), create_runner(gq.load(saved_models / "shared", signature="serving_default"))
    scores = np.concatenate([runner.run(row)["scores"] for row in rows])
    np.testing.assert_allclose(scores, dense.run({"x": padded})["scores"], rtol=1e-5, atol=1e-6)
    result = gq.insert(model, data=rows)
    assert result.validation is not None
    assert result.validation.worst_sqnr is not None
    assert result.validation.worst_sqnr > 20
    ragged = tf.ragged.constant([row["rows"][0].tolist() for row in rows], dtype=tf.float32)
    stats = [gq.calibrate(model, data=data).samples for data in (rows, {"rows": ragged})]
    assert stats == [SAMPLES, SAMPLES]
    same = gq.insert(model, data={"rows": ragged})
    assert [repr(pair.params) for pair in same.inserted] == [repr(pair.params) for pair in result.inserted]
    with pytest.raises(DataError, match="'rows'"):
        gq.insert(model, data={"values": texts})


@pytest.mark.slow
def test_records_feed_a_model_that_parses_examples(tmp_path: Path) -> None:
    """Whole records of TFRecord files feed a string input, unless they have a feature of its name."""
    tf = pytest.importorskip("tensorflow")
    random = np.random.default_rng(0)
    module = tf.Module()
    module.kernel = tf.Variable(random.normal(0, 0.4, (TEXT_SIZE, CLASSES)).astype(np.float32))

    def score(examples: Any) -> Any:
        features = tf.io.parse_example(examples, {"x": tf.io.FixedLenFeature([TEXT_SIZE], tf.float32)})
        return {"scores": tf.matmul(features["x"], module.kernel)}

    function = tf.function(score).get_concrete_function(tf.TensorSpec([None], tf.string, "examples"))
    tf.saved_model.save(module, str(tmp_path / "net"), signatures=function)
    rows = random.uniform(-1, 1, (SAMPLES, TEXT_SIZE)).astype(np.float32)
    records = write_tfrecord(tmp_path / "data.tfrecord", [encode_example(x=row) for row in rows])
    dataset = open_data(str(records), input_specs(gq.load(tmp_path / "net")))
    assert [feed["serving_default_examples"].tolist() for feed in dataset.feeds_between(0, 1)] == [
        [encode_example(x=rows[0])]
    ]
    result = gq.insert(tmp_path / "net", data=str(records))
    assert result.validation is not None
    assert result.validation.worst_sqnr is not None
    assert result.validation.worst_sqnr > 20
    named = write_tfrecord(tmp_path / "named.tfrecord", [encode_example(examples=b"text")])
    feeds = open_data(str(named), input_specs(gq.load(tmp_path / "net")))
    assert [feed["serving_default_examples"].tolist() for feed in feeds] == [["text"]]


def test_parts_of_sparse_and_ragged_tensors() -> None:
    """A sparse tensor gets indices, values and shape, a ragged one flat values and row splits from the outside in."""
    sparse = FedTensors(encoding="sparse", ops=("indices", "values", "shape"))
    parts = sparse.encode(np.array([[b"", b"a"], [b"bc", b""]], object))
    assert parts["indices"].tolist() == [[0, 1], [1, 0]]
    assert parts["values"].tolist() == [b"a", b"bc"]
    assert parts["shape"].tolist() == [2, 2]
    ragged = FedTensors(encoding="ragged", ops=("values", "outer", "inner"))
    parts = ragged.encode(np.arange(24).reshape(2, 3, 4))
    assert parts["values"].tolist() == list(range(24))
    assert parts["outer"].tolist() == [0, 3, 6]
    assert parts["inner"].tolist() == [0, 4, 8, 12, 16, 20, 24]


def test_data_specs_by_signature() -> None:
    """Settings belong to the signature before them; a spec of a single dataset has no parts."""
    assert split_by_signature("text=a.npz,image=photos,preset=unit,mean=1:2:3,inputs.x=img") == {
        "text": "a.npz",
        "image": "photos,preset=unit,mean=1:2:3,inputs.x=img",
    }
    for spec in ("a.npz", "photos,preset=unit", "module:function", "train.tfrecord,inputs.x=image/encoded"):
        assert split_by_signature(spec) == {}


def test_samples_of_several_signatures_are_repeated_in_order(tmp_path: Path) -> None:
    """The shorter data is repeated, each sample next to its copies, so that the last samples stay the last."""
    specs = [InputSpec(name=name, dtype="int64", shape=(None, 1), signatures=(name,)) for name in ("long", "short")]
    for name, count in (("long", 5), ("short", 2)):
        np.savez(tmp_path / f"{name}.npz", **{name: np.arange(count)[:, None]})
    dataset = open_data(f"long={tmp_path}/long.npz,short={tmp_path}/short.npz", specs)
    rows = [[int(feed["long"].item()), int(feed["short"].item())] for feed in dataset]
    assert rows == [[0, 0], [1, 0], [2, 0], [3, 1], [4, 1]]
    assert [int(feed["short"].item()) for feed in dataset.feeds_between(2, 4)] == [0, 1]
    with pytest.raises(DataError, match="'short'"):
        open_data(f"long={tmp_path}/long.npz", specs)


@pytest.mark.slow
def test_tags_choose_the_meta_graph(tmp_path: Path) -> None:
    """`--tags` edits the MetaGraph with exactly these tags, and `plan` and `insert` name the others."""
    tf = pytest.importorskip("tensorflow")
    v1 = tf.compat.v1
    builder = v1.saved_model.builder.SavedModelBuilder(str(tmp_path / "net"))
    for tags in (["serve"], ["serve", "gpu"], []):
        with v1.Graph().as_default(), v1.Session() as session:
            x = v1.placeholder(tf.float32, [None, TEXT_SIZE], name="x")
            kernel = v1.get_variable("kernel", [TEXT_SIZE, 2], use_resource=True)
            y = tf.matmul(x, kernel, name="_".join(["product", *tags]))
            session.run(v1.global_variables_initializer())
            signature = v1.saved_model.signature_def_utils.predict_signature_def({"x": x}, {"y": y})
            if tags == ["serve"]:
                builder.add_meta_graph_and_variables(session, tags, {"serving_default": signature})
            else:
                builder.add_meta_graph(tags, {"serving_default": signature})
    builder.save()
    for tags, op in ((), "product_serve"), ("serve,gpu", "product_serve_gpu"):
        plan = gq.plan(tmp_path / "net", rules=["weight_only"], tags=tags)
        assert {use.op for site in plan.sites for use in site.uses} == {op}
    output = tmp_path / "quantized"
    outcome = run_cli("insert", tmp_path / "net", "--rules", "weight_only", "--tags", "gpu,serve", "-o", output)
    assert "serve" in next(line for line in outcome.stderr.splitlines() if "MetaGraph" in line)
    kinds = [{op.kind for op in gq.load(output, tags=tags).main.ops()} for tags in ("serve", "serve,gpu", "")]
    assert ["qdq" in each for each in kinds] == [False, True, False]
    # The empty text stands for the MetaGraph without tags, in each command.
    assert gq.load(output, tags="").main.outputs == ["@serving_default/y"]
    for tags in ("serve,gpu", ""):
        run_cli("freeze", tmp_path / "net", "--tags", tags, "-o", tmp_path / f"{len(tags)}.pb")
        frozen = gq.load(tmp_path / f"{len(tags)}.pb")
        assert "_".join(["product", *filter(None, tags.split(","))]) in {op.name for op in frozen.main.ops()}
    run_cli("diff", tmp_path / "net", output, "--tags", "serve")
    run_cli("diff", tmp_path / "net", output, "--tags", "gpu,serve", code=1)
    assert "product_serve_gpu" in run_cli("inspect", output, "--tags", "serve,gpu").stdout
    run_cli("check", output, "--tags", "serve,gpu")
    run_cli("strip", output, "--tags", "serve,gpu", "--check", tmp_path / "net")
    outcome = run_cli("freeze", tmp_path / "net", "--tags", "tpu", "-o", tmp_path / "tpu.pb", code=UsageError.exit_code)
    assert "no tags" in outcome.stderr
    with pytest.raises(UsageError, match="no MetaGraph with no tags"):
        gq.load("sample_models/digits_cnn_saved_model", tags="")


@pytest.mark.slow
def test_freeze_takes_a_signature(saved_models: Path, tmp_path: Path) -> None:
    """The frozen graph has the inputs and outputs of the selected signature."""
    for name, width in (("text", TEXT_SIZE), ("image", IMAGE_SIZE)):
        run_cli("freeze", saved_models / "towers", "--signature", name, "-o", tmp_path / f"{name}.pb")
        (spec,) = input_specs(gq.load(tmp_path / f"{name}.pb"))
        assert spec.shape == (None, width)
