"""Data and models in memory as arguments of the public functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import graphquant as gq
from graphquant.errors import DataError, ModelError, UsageError

SAMPLES = Path(__file__).parents[2] / "sample_models"
MODEL, DATA = SAMPLES / "digits_cnn.onnx", SAMPLES / "digits_cnn_eval.npz"
COUNT = 24


class Reader:
    """A CalibrationDataReader, which returns None after the last item."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Prepare the items."""
        self.items = iter([{"image": image[None]} for image in arrays["image"]])

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next item."""
        return next(self.items, None)


class Tensor:
    """A tensor that needs a gradient, like a parameter of PyTorch."""

    def __init__(self, values: np.ndarray) -> None:
        """Wrap an array."""
        self.values = values

    def detach(self) -> Tensor:
        """Return the tensor without a gradient."""
        return Tensor(self.values)

    def cpu(self) -> np.ndarray:
        """Return the values."""
        return self.values


class ShufflingLoader:
    """A loader of batches of features and labels, whose order differs in each pass."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Wrap the arrays."""
        self.arrays, self.passes = arrays, 0

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield pairs, in the order of the arrays in the first pass only."""
        images, labels = (np.roll(self.arrays[name], 7 * self.passes, 0) for name in ("image", "labels"))
        self.passes += 1
        for start in range(0, COUNT, 10):
            yield [Tensor(images[start : start + 10]), labels[start : start + 10]]


def generate(arrays: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Yield one item for each sample."""
    yield from ({"image": image, "labels": label} for image, label in zip(*map(arrays.get, arrays), strict=True))


FORMS: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    "dict": lambda arrays: arrays,
    "array": lambda arrays: arrays["image"],
    "pair": lambda arrays: (arrays["image"], arrays["labels"]),
    "list of dicts": lambda arrays: [{"image": image} for image in arrays["image"]],
    "list of arrays": lambda arrays: list(arrays["image"]),
    "generator": generate,
    "reader": Reader,
    "loader": ShufflingLoader,
}


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    """Images and labels of a few samples."""
    with np.load(DATA) as file:
        return {name: file[name][:COUNT] for name in ("image", "labels")}


@pytest.fixture(scope="module")
def from_file(arrays, tmp_path_factory) -> gq.Result:
    """The result of the same samples in a file."""
    path = tmp_path_factory.mktemp("data") / "data.npz"
    np.savez(path, **arrays)
    return gq.insert(MODEL, data=path)


def scales(result: gq.Result) -> list[list[float]]:
    """Return the scales of all pairs."""
    return [np.ravel(pair.params.scale).tolist() for pair in result.inserted]


@pytest.mark.parametrize("form", FORMS)
def test_insert_takes_each_form(form: str, arrays, from_file) -> None:
    """Each form gives the scales and the errors of the same samples in a file."""
    result = gq.insert(MODEL, data=FORMS[form](arrays))
    assert result.plan == from_file.plan
    assert scales(result) == scales(from_file)
    comparison, expected = result.validation.comparison, from_file.validation.comparison
    assert comparison.samples == expected.samples
    assert [output.sqnr for output in comparison.outputs] == [output.sqnr for output in expected.outputs]
    has_labels = form in {"dict", "pair", "generator", "loader"}
    assert [output.accuracy for output in comparison.outputs] == [
        output.accuracy if has_labels else None for output in expected.outputs
    ]


@pytest.mark.parametrize("form", FORMS)
def test_other_functions_take_each_form(form: str, arrays, from_file) -> None:
    """`calibrate`, `compare` and `check_data` accept the forms of `insert`."""
    assert gq.calibrate(MODEL, data=FORMS[form](arrays)).samples == COUNT
    assert gq.compare(MODEL, from_file.model, FORMS[form](arrays), samples=4).samples == 4
    assert gq.check_data(MODEL, FORMS[form](arrays), samples=4).samples == 4


@pytest.mark.slow
def test_tf_datasets(arrays, from_file) -> None:
    """A tf.data.Dataset that shuffles is read once."""
    tensorflow = pytest.importorskip("tensorflow")
    dataset = tensorflow.data.Dataset.from_tensor_slices((arrays["image"], arrays["labels"])).batch(8)
    result = gq.insert(MODEL, data=dataset)
    assert scales(result) == scales(from_file)
    assert gq.calibrate(MODEL, data=dataset.shuffle(3)).samples == COUNT


def test_samples_limit_endless_data(arrays) -> None:
    """With `samples`, no more items are read than needed."""

    def repeat() -> Iterator[np.ndarray]:
        for index in range(COUNT):
            yield arrays["image"][index]
        raise RuntimeError("the data was read to its end")

    assert gq.calibrate(MODEL, data=repeat(), samples=6).samples == 6
    with pytest.raises(DataError, match="read to its end"):
        gq.calibrate(MODEL, data=repeat())


def test_kept_items_have_a_limit(arrays, monkeypatch) -> None:
    """Items that would fill the free memory are an error; a list of the caller is none."""
    monkeypatch.setattr("graphquant.calibration.data.function.available_memory", lambda: 1000)
    with pytest.raises(DataError, match="samples"):
        gq.calibrate(MODEL, data=iter(arrays["image"]))
    assert gq.calibrate(MODEL, data=list(arrays["image"])).samples == COUNT


@pytest.mark.parametrize("data", [7, b"bytes", {1, 2}, object(), len, dict], ids=lambda data: type(data).__name__)
def test_values_that_are_no_data(data: Any) -> None:
    """Other types are an error that names the argument."""
    with pytest.raises(UsageError, match="data"):
        gq.insert(MODEL, data=data)


@pytest.mark.parametrize(
    "data", [[], {}, iter(()), {"images": np.zeros((4, 8, 8, 1), np.float32)}, np.zeros(3), [None], (), "x"[:0]]
)
def test_data_that_does_not_fit(data: Any) -> None:
    """Data without samples, inputs or the right shape is an error about data."""
    with pytest.raises(DataError):
        gq.insert(MODEL, data=data)


def test_models_in_memory(arrays, tmp_path: Path) -> None:
    """An onnx.ModelProto gives the result of its file, and does not change."""
    message = onnx.load(MODEL)
    before = message.SerializeToString(deterministic=True)
    result, expected = (gq.insert(model, data=arrays) for model in (message, MODEL))
    assert message.SerializeToString(deterministic=True) == before
    assert scales(result) == scales(expected)
    path = result.save(tmp_path / "quantized.onnx")
    assert gq.compare(message, path, arrays, samples=4).samples == 4


def test_incomplete_models_in_memory(tmp_path: Path) -> None:
    """A message without a graph, or without its external data, is an error about the model."""
    with pytest.raises(ModelError):
        gq.load(onnx.ModelProto())
    message = onnx.load(MODEL)
    onnx.save(message, tmp_path / "external.onnx", save_as_external_data=True, size_threshold=0)
    with pytest.raises(ModelError, match="external data"):
        gq.load(onnx.load(tmp_path / "external.onnx", load_external_data=False))
    with pytest.raises(UsageError, match="outputs"):
        gq.load(onnx.load(MODEL), outputs=["x"])
