"""Keras files become SavedModels; code in such files never runs."""

from __future__ import annotations

import importlib.machinery
import json
import pickle
import random
import shutil
import sys
import threading
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest
from support.tensorflow_models import half_precision_network, keras_network

import graphquant as gq
from graphquant.analysis.model_summary import summarize_model
from graphquant.errors import MissingDependencyError, ModelError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

tf: Any = None
keras: Any = None

rng = np.random.default_rng(5)
IMAGES = rng.normal(size=(8, 8, 8, 1)).astype(np.float32)


@pytest.fixture(scope="module", autouse=True)
def import_keras() -> None:
    """Import Keras before the first test. At the top of the module, every collection would wait for it."""
    global tf, keras
    tf, keras = pytest.importorskip("tensorflow"), pytest.importorskip("keras")


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the working folder of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["net.keras", "net.h5", "net.hdf5"])
def test_file_becomes_a_saved_model(empty_folder: Path, cli: Callable[..., Any], name: str) -> None:
    """Both kinds of file give a SavedModel with the results of TensorFlow's own ops."""
    model = keras_network()
    model.save(name)
    output_text = cli("insert", name, "--rules", "fixed_point").stdout
    assert "4 tensors quantized" in output_text
    assert "net.quant" in output_text
    assert sorted(path.name for path in empty_folder.iterdir()) == sorted([name, "net.quant"])

    def fixed(x: Any, exponent: int) -> Any:
        top = 127 * 2.0**exponent
        return tf.quantization.fake_quant_with_min_max_vars(x, -top, top, 8, narrow_range=True)

    conv, norm, logits = (model.get_layer(layer) for layer in ("conv", "norm", "logits"))
    hidden = tf.nn.relu(tf.nn.conv2d(fixed(IMAGES, -4), fixed(conv.kernel, -6), 1, "VALID") + conv.bias)
    flat = tf.reshape(norm(hidden), [8, -1])
    expected = tf.matmul(fixed(flat, -4), fixed(logits.kernel, -6)) + logits.bias
    loaded = tf.saved_model.load("net.quant")
    np.testing.assert_allclose(loaded.serve(IMAGES), expected, rtol=1e-5, atol=1e-5)
    layer = keras.layers.TFSMLayer("net.quant", call_endpoint="serve")
    np.testing.assert_allclose(layer(IMAGES), expected, rtol=1e-5, atol=1e-5)
    assert len(loaded.trainable_variables) == 6


def test_each_export_of_a_file_is_the_same(empty_folder: Path, cli: Callable[..., Any]) -> None:
    """Keras draws the seed of a Dropout, and TensorFlow orders variables by their addresses. `strip` sees no change."""
    units = [keras.layers.Dense(3, name=f"d{number}") for number in range(12)]
    keras.Sequential([keras.Input((3,), name="x"), *units, keras.layers.Dropout(0.5)]).save("net.keras")
    models = [gq.load("net.keras") for _ in range(2)]
    messages = [model.source.message.SerializeToString(deterministic=True) for model in models]
    assert messages[0] == messages[1]
    seeds = [
        [op.read_value() for _, op in model.reachable_ops() if "seed" in op.name and op.read_value] for model in models
    ]
    assert seeds[0]
    np.testing.assert_array_equal(*seeds)
    cli("insert", "net.keras", "--rules", "fixed_point")
    assert "identical" in cli("strip", "net.quant", "-o", "stripped", "--check", "net.keras").stdout


def test_threads_export_one_after_the_other(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export changes state of the process, such as the random seed, and restores it, also beside other graphs."""
    from tensorflow.python.framework.func_graph import FuncGraph

    keras_network().save("net.keras")
    variables, state = FuncGraph.variables, random.getstate()
    load_model, meeting, names = keras.saving.load_model, threading.Barrier(2), []

    def meet(*arguments: Any, **options: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(1)  # of the other thread, which must not come
        with tf.Graph().as_default():
            graph = FuncGraph("of_another_thread")
            graph.variables = [tf.Variable(0.0, name=name) for name in "ab"]
        names.extend(variable.name for variable in graph.variables)
        return load_model(*arguments, **options)

    monkeypatch.setattr(keras.saving, "load_model", meet)
    with ThreadPoolExecutor(2) as pool:
        models = list(pool.map(gq.load, ["net.keras", "net.keras"]))
    assert models[0].source.message == models[1].source.message
    assert meeting.broken
    assert FuncGraph.variables is variables
    assert random.getstate() == state
    assert sorted(names) == ["a:0", "a:0", "b:0", "b:0"]


def test_calibrated_and_applied_later(empty_folder: Path, cli: Callable[..., Any]) -> None:
    """Plans and statistics work across processes: names and digest are reproducible."""
    keras_network().save("net.keras")
    np.savez("x.npz", image=IMAGES)
    cli("calibrate", "net.keras", "--data", "x.npz", "-o", "stats.gqs")
    Path("plan.json").write_text(cli("plan", "net.keras", "--format", "json").stdout)
    output_text = cli("insert", "net.keras", "--plan", "plan.json", "--stats", "stats.gqs").stdout
    assert "tensors quantized" in output_text
    model = gq.load("net.keras")
    tf.function(lambda x: x)(1)  # moves the numbers that tracing gives
    assert gq.load(Path("net.keras")).graphs.keys() == model.graphs.keys()
    assert not [name for name in model.graphs if name.startswith("__inference_")]
    assert empty_folder.joinpath("net.quant").is_dir()


def test_temporary_folder_lives_as_long_as_the_model(empty_folder: Path) -> None:
    """The exported files exist exactly as long as the model."""
    keras_network().save("net.keras")
    model = gq.load("net.keras")
    result = gq.insert(model, rules=["weight_only"])
    folder = Path(model.source.temp_folder.name)
    assert folder.is_dir()
    del model
    result.save("out")
    assert (empty_folder / "out" / "variables" / "variables.index").is_file()
    del result
    assert not folder.exists()


def test_output_is_a_folder(empty_folder: Path, cli: Callable[..., Any]) -> None:
    """A Keras file name as output is refused before any work, because Keras files cannot contain ops."""
    keras_network().save("net.keras")
    error_text = cli("insert", "net.keras", "--rules", "fixed_point", "-o", "quant.keras", code=2).stderr
    assert "quant.keras " in error_text
    assert "name quant; keras.layers.TFSMLayer" in error_text
    error_text = cli("insert", "net.keras", "--rules", "fixed_point", "-o", "quant.pb", code=2).stderr
    assert "a SavedModel is a folder" in error_text
    assert [path.name for path in empty_folder.iterdir()] == ["net.keras"]


def test_without_tensorflow(empty_folder: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tensorflow the message contains the install command, and the exit code is 4."""
    keras_network().save("net.keras")
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    error_text = cli("insert", "net.keras", "--rules", "fixed_point", code=4).stderr
    assert "net.keras " in error_text
    assert "pip install 'graphquant[tensorflow]'" in error_text
    with pytest.raises(MissingDependencyError):
        gq.load(empty_folder / "net.keras")


def test_other_backend(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras with another backend is refused."""
    keras_network().save("net.keras")
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(UsageError, match=r"jax.*KERAS_BACKEND=tensorflow"):
        gq.load(empty_folder / "net.keras")
    with pytest.raises(UsageError, match="on jax"):
        gq.load(keras_network())


# -- hostile and damaged files ---------------------------------------------------------------------


def write_other_config(config: Callable[[Any], Any], source: str = "net.keras", target: str = "bad.keras") -> None:
    """Write a copy of a `.keras` file with another configuration."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, json.dumps(config(json.loads(data))) if name == "config.json" else data)


def with_lambda() -> Any:
    """Return a model with Python code that writes a file when it is run or loaded."""
    inputs = keras.Input((4,))
    write = keras.layers.Lambda(lambda x: (open("ran", "w").close(), x)[1], name="evil")  # noqa: PTH123  # one expression
    return keras.Model(inputs, write(inputs))


@pytest.mark.parametrize("name", ["evil.keras", "evil.h5"])
def test_code_is_not_run(empty_folder: Path, cli: Callable[..., Any], name: str) -> None:
    """A Lambda layer is refused by name, and its code does not run even if Keras would allow it."""
    with_lambda().save(name)
    (empty_folder / "ran").unlink(missing_ok=True)
    keras.config.enable_unsafe_deserialization()
    try:
        error_text = cli("inspect", name, code=3).stderr
    finally:
        keras.src.backend.common.global_state.set_global_attribute("safe_mode_saving", None)
    assert f"{name} " in error_text
    assert "'evil'" in error_text
    assert "model.export(folder)" in error_text
    assert not (empty_folder / "ran").exists()


class Bomb:
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return (open, ("ran", "w"))


def test_pickles_are_not_read(empty_folder: Path) -> None:
    """A pickle in an `.h5` file, or a class that unpickles, is never loaded."""
    keras_network().save("net.h5")
    with h5py.File("net.h5", "r+") as file:
        config = json.loads(file.attrs["model_config"])
        config["config"]["layers"][1]["config"]["activation"] = {
            "class_name": "__lambda__",
            "config": {"value": [pickle.dumps(Bomb()).hex(), None, None]},
        }
        file.attrs["model_config"] = json.dumps(config)
    with pytest.raises(ModelError, match="lambda layer"):
        gq.load(empty_folder / "net.h5")
    assert not (empty_folder / "ran").exists()


def test_foreign_classes_are_not_imported(empty_folder: Path) -> None:
    """A module named by a file is not imported."""
    keras_network().save("net.keras")
    Path("surprise.py").write_text("open('ran', 'w')\n")

    def renamed(config: Any) -> Any:
        config["config"]["layers"][1].update(module="surprise", class_name="Layer")
        return config

    write_other_config(renamed)
    with pytest.raises(ModelError, match="needs the class 'Layer'"):
        gq.load(empty_folder / "bad.keras")
    assert not (empty_folder / "ran").exists()

    def custom(config: Any) -> Any:
        config["config"]["layers"][1].update(module=None, class_name="Mine", registered_name="Mine")
        return config

    write_other_config(custom)
    with pytest.raises(ModelError, match="needs the class 'Mine'"):
        gq.load(empty_folder / "bad.keras")
    write_other_config(lambda config: {**config, "class_name": ["Functional"]})
    with pytest.raises(ModelError, match=r"bad\.keras"):
        gq.load(empty_folder / "bad.keras")


def test_links_are_not_followed(empty_folder: Path) -> None:
    """Weights in another file are refused, in both kinds of file."""
    model = keras_network()
    model.save("net.h5")
    model.save("net.keras")
    shutil.copy("net.h5", "linked.h5")
    with h5py.File("linked.h5", "r+") as file:
        del file["model_weights"]
        file["model_weights"] = h5py.ExternalLink("net.h5", "model_weights")
    with pytest.raises(ModelError, match=r"'model_weights' .*another file"):
        gq.load(empty_folder / "linked.h5")
    Path("secret").write_bytes(bytes(64))
    with h5py.File("model.weights.h5", "w") as file:
        file.create_dataset("layers/conv/vars/0", (16,), "f4", external=[("secret", 0, 64)])
    with zipfile.ZipFile("net.keras") as old, zipfile.ZipFile("bad.keras", "w") as new:
        new.writestr("config.json", old.read("config.json"))
        new.write("model.weights.h5")
    with pytest.raises(ModelError, match=r"'0' .*another file"):
        gq.load(empty_folder / "bad.keras")


def test_damaged_files(empty_folder: Path) -> None:
    """Truncated, empty, foreign and endlessly nested files are refused."""
    model = keras_network()
    model.save("net.keras")
    model.save("net.h5")
    model.save_weights("only.weights.h5")
    for name in ("net.keras", "net.h5"):
        intact_bytes = Path(name).read_bytes()
        for size in (0, 100, len(intact_bytes) // 2, len(intact_bytes) - 50):
            bad = empty_folder / f"bad{Path(name).suffix}"
            bad.write_bytes(intact_bytes[:size])
            with pytest.raises(ModelError, match=f"bad{bad.suffix}"):
                gq.load(bad)
    with pytest.raises(ModelError, match=r"only\.weights\.h5 .*without .*layers"):
        gq.load(empty_folder / "only.weights.h5")
    with zipfile.ZipFile("bad.keras", "w") as file:
        file.writestr("config.json", "[" * 100_000)
    with pytest.raises(ModelError, match=r"bad\.keras .*Keras model"):
        gq.load(empty_folder / "bad.keras")
    with zipfile.ZipFile("bad.keras", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("config.json", " " * (1 << 27))
    with pytest.raises(ModelError, match=r"bad\.keras.* 134217728 bytes"):
        gq.load(empty_folder / "bad.keras")
    write_other_config(lambda config: {**config, "config": {"layers": [{}]}})
    with pytest.raises(ModelError, match="cannot read"):
        gq.load(empty_folder / "bad.keras")


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16", "bfloat16"])
def test_half_precision_is_quantized_like_float32(tmp_path: Path, policy: str) -> None:
    """Weights and activations are quantized, with the error of the float32 model, and strip restores the source."""
    values = np.random.default_rng(0).normal(size=(40, 8, 8, 3)).astype(np.float32)
    sqnr = []
    for name in ("float32", policy):
        half_precision_network(name, tmp_path / f"{name}.keras")
        result = gq.insert(tmp_path / f"{name}.keras", data={"x": values})
        assert len([pair for pair in result.inserted if pair.site.parameter]) == 2
        assert result.quantized_share == 1
        assert result.validation is not None
        sqnr.append(result.validation.worst_sqnr)
    assert sqnr[1] > sqnr[0] - 1
    quantized = gq.load(gq.save(result.model, tmp_path / "half"))
    assert gq.strip(quantized).exact
    # The axis of channels is known behind the Casts too.
    axes = [
        {row.op: getattr(row.params, "axis", None) for row in summarize_model(each).distinct_ops}
        for each in (result.model, quantized)
    ]
    assert axes[0] == axes[1]
    assert set(axes[0].values()) == {None, 3}


@pytest.mark.parametrize("name", ["net.keras", "net.h5"])
def test_files_of_keras_2_are_read_by_tf_keras(empty_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A file of Keras 2 goes to tf_keras if it is installed; a stand-in records the calls."""
    keras_network().save(name)
    set_keras_version(name, "2.15.0")
    requests = []

    class ModelOfKeras2:
        """A model whose export has the arguments and the output of tf_keras."""

        def __init__(self, model: Any) -> None:
            self.model = model

        def export(self, folder: Path) -> None:
            print("Saved artifact")  # noqa: T201  # as tf_keras does
            self.model.export(folder, verbose=False)

    def load_model(path: Path, *, compile: bool, safe_mode: bool) -> ModelOfKeras2:  # noqa: A002  # tf_keras's name
        requests.append((path.name, compile, safe_mode))
        return ModelOfKeras2(keras.saving.load_model(path, compile=False))

    stand_in = types.ModuleType("tf_keras")
    stand_in.__spec__ = importlib.machinery.ModuleSpec("tf_keras", None)
    stand_in.saving = types.SimpleNamespace(  # type: ignore[attr-defined]
        load_model=load_model, get_registered_object=lambda name: None
    )
    stand_in.__version__ = "2.21.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tf_keras", stand_in)
    gq.load(Path(name))
    assert requests == [(name, False, True)]
    set_keras_version(name, "3.9.0")
    gq.load(Path(name))
    assert len(requests) == 1


def set_keras_version(name: str, version: str) -> None:
    """Write another version of Keras into a file."""
    if name.endswith(".h5"):
        with h5py.File(name, "r+") as file:
            file.attrs["keras_version"] = version
        return
    with zipfile.ZipFile(name) as old:
        members = {member: old.read(member) for member in old.namelist()}
    members["metadata.json"] = json.dumps({"keras_version": version}).encode()
    with zipfile.ZipFile(name, "w") as new:
        for member, data in members.items():
            new.writestr(member, data)


def test_files_of_keras_2_that_keras_3_cannot_read(
    empty_folder: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without tf_keras the message has the command that installs it, and the exit code is 4."""
    keras_network().save("net.keras")
    write_other_config(lambda config: {**config, "module": "tf_keras.src.engine.functional"})
    set_keras_version("bad.keras", "2.15.0")
    monkeypatch.setitem(sys.modules, "tf_keras", None)
    error_text = cli("inspect", "bad.keras", code=4).stderr
    assert "pip install tf-keras" in error_text
    assert "Keras 2.15.0" in error_text


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_real_tf_keras(empty_folder: Path) -> None:
    """A model of tf_keras gives the same result from memory and from both kinds of file."""
    tf_keras = pytest.importorskip("tf_keras")
    image = tf_keras.Input((8, 8, 1), name="image")
    hidden = tf_keras.layers.Conv2D(4, 3, activation="relu")(image)
    hidden = tf_keras.layers.Flatten()(tf_keras.layers.BatchNormalization()(hidden))
    model = tf_keras.Model(image, tf_keras.layers.Dense(3, name="logits")(hidden))
    results = []
    for source in (model, "net.h5", "net.keras"):
        if source is not model:
            model.save(source)
        result = gq.insert(source, data={"image": IMAGES})
        results.append((len(result.inserted), round(result.validation.worst_sqnr, 2)))
    assert len(set(results)) == 1
