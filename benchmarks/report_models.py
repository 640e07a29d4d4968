"""The models of `report.py` and `latency.py`, with samples for calibration and unseen ones.

They are the sample models, seeded nets, and the trained models of `shared/models` that have data. A calibration gets
100 samples, or as many as there are. TensorFlow is required for the Keras net, and tf2onnx for the keyword net.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import onnx
from accuracy_models import SEEDED
from block_models import BLOCKS, SAVED_MODELS
from further_models import FURTHER
from oracle import ROOT, truth
from peers_models import Case, cases, upgraded

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from peers_models import Arrays

SAMPLES = 100
"""Number of samples for a calibration, if there are as many."""

ONNX = (
    *("digits_cnn", "digits_cnn_bn", "digits_rnn", "face_detector", "silero_vad", "keyword_net", "transformer", "lstm"),
)
"""Models of `peers_models.py`."""

TENSORFLOW = (
    *("digits_cnn.pb", "digits_cnn.pbtxt", "digits_cnn_saved_model", "digits_rnn.pb", "digits_rnn_saved_model"),
)


def models(given: Path, folder: Path, only: Collection[str]) -> Iterator[Case]:
    """Yield the models of NAMES that are in `only`, or all if it is empty; `folder` is for their files."""

    def wanted(name: str) -> bool:
        return not only or name in only

    if names := [name for name in ONNX if wanted(name)]:
        yield from (with_all_samples(case) for case in cases(given, folder, names, []))
    if wanted("digits_nested"):
        yield sample_model(ROOT / "sample_models/digits_nested.onnx")
    for name, make in (SEEDED | BLOCKS | FURTHER).items():
        if not wanted(name):
            continue
        message, data = make()
        truth.name_ops(message)
        onnx.save(message, folder / f"{name}.onnx")
        yield split_samples(name, folder / f"{name}.onnx", data)
    for name in filter(wanted, SAVED_MODELS):
        yield split_samples(name, folder / name, SAVED_MODELS[name](folder / name))
    yield from (sample_model(ROOT / "sample_models" / name) for name in filter(wanted, TENSORFLOW))
    if given.is_dir():
        yield from (SHARED[name](name, given, folder) for name in filter(wanted, SHARED))


def split_samples(name: str, model: Path, data: Arrays) -> Case:
    """Create a case whose first 100 samples are for calibration."""
    pool, held_out = ({key: array[part] for key, array in data.items()} for part in CUTS)
    return Case(name=name, model=model, pool=pool, held_out=held_out, samples=SAMPLES)


CUTS = (slice(SAMPLES), slice(SAMPLES, None))


def with_all_samples(case: Case) -> Case:
    """Move held-out samples to calibration if it has less than 100, but at most a quarter of them."""
    count, others = (max(len(array) for array in part.values() if array.ndim) for part in (case.pool, case.held_out))
    moved = min(max(SAMPLES - count, 0), others // 4)
    pool, held_out = {}, {}
    for name, array in case.pool.items():
        other = case.held_out[name]
        pool[name] = np.concatenate([array[:SAMPLES], other[:moved]]) if array.ndim else array
        held_out[name] = other[moved:] if array.ndim else other
    return replace(case, pool=pool, held_out=held_out, samples=min(count + moved, SAMPLES))


def sample_model(model: Path) -> Case:
    """Create the case of a file in `sample_models`."""
    stem = model.with_name("_".join(model.name.split(".")[0].split("_")[:2]))
    pool, held_out = (dict(np.load(f"{stem}_{part}.npz")) for part in ("calib", "eval"))
    return Case(name=model.name.removesuffix(".onnx"), model=model, pool=pool, held_out=held_out, samples=SAMPLES)


def with_data_files(model: str, data: str) -> Callable[[str, Path, Path], Case]:
    """Return the builder of a case whose samples are in the files `data`, with `calib` or `eval` in their names."""

    def build(name: str, given: Path, folder: Path) -> Case:
        pool, held_out = (read_arrays(given / data.format(part)) for part in ("calib", "eval"))
        if not model.endswith(".onnx"):
            pool, held_out = ({signature_key(name): array for name, array in part.items()} for part in (pool, held_out))
        count = max(len(array) for array in pool.values() if array.ndim)
        path = upgraded_file(name, given / model, folder)
        return Case(name=name, model=path, pool=pool, held_out=held_out, samples=count)

    return build


def read_arrays(path: Path) -> Arrays:
    """Read the arrays of a file. Labels are called `labels`, as graphquant expects them."""
    with np.load(path) as arrays:
        return {"labels" if name == "label" else name: arrays[name] for name in arrays.files}


def signature_key(name: str) -> str:
    """Return the key of the default signature that the name of a tensor stands for."""
    return name.removeprefix("serving_default_").removesuffix(":0")


def with_pictures(
    model: str, key: str, pictures: Callable[[Path], np.ndarray], held_out: int
) -> Callable[[str, Path, Path], Case]:
    """Return the builder of a case with one input, whose last `held_out` pictures are unseen."""

    def build(name: str, given: Path, folder: Path) -> Case:
        values = pictures(given)
        path, pool = upgraded_file(name, given / model, folder), {key: values[:-held_out]}
        return Case(name=name, model=path, pool=pool, held_out={key: values[-held_out:]}, samples=len(pool[key]))

    return build


def upgraded_file(name: str, model: Path, folder: Path) -> Path:
    """Write an ONNX model of an old opset at opset 13, which all tools read, if onnx can convert it."""
    if model.suffix != ".onnx":
        return model
    message = onnx.load(model)
    try:
        message = upgraded(message)
    except Exception:  # noqa: BLE001  # of many types; the tools get the model as it is
        message = onnx.load(model)
    truth.name_ops(message)
    onnx.save(message, folder / f"{name}.onnx")
    return folder / f"{name}.onnx"


def face_crops(given: Path) -> np.ndarray:
    """Return the crops of faces with the mean and deviation of ImageNet, float32 (64, 3, 224, 224)."""
    rgb = np.load(given / "osf/crops.npz")["rgb"].astype(np.float32)
    return ((rgb / 255 - 0.45) / 0.225).transpose(0, 3, 1, 2)


def half_precision_crops(given: Path) -> np.ndarray:
    """Return the crops of faces as BGR from 0 to 255, float16 (64, 1, 3, 224, 224)."""
    return np.load(given / "osf/crops.npz")["rgb"][..., ::-1].transpose(0, 3, 1, 2)[:, None].astype(np.float16)


def large_photographs(given: Path) -> np.ndarray:
    """Return photographs as BGR from 0 to 255, resized to the nearest pixel, float32 (50, 1, 3, 416, 416).

    Each has its mirror image beside it, so that the unseen ones are of other photographs.
    """
    rgb = np.load(given / "ultraface/images.npz")["rgb"]
    rows, columns = (np.arange(416) * size // 416 for size in rgb.shape[1:3])
    bgr = rgb[:, rows][:, :, columns, ::-1].astype(np.float32).transpose(0, 3, 1, 2)
    return np.stack([bgr, bgr[..., ::-1]], 1).reshape(-1, 1, 3, 416, 416)


SHARED: dict[str, Callable[[str, Path, Path], Case]] = {
    "dtln_1": with_data_files("dtln/model_1.onnx", "dtln/model_1_{}.npz"),
    "dtln_2": with_data_files("dtln/model_2.onnx", "dtln/model_2_{}.npz"),
    "basic_pitch": with_data_files("basic_pitch/nmp.onnx", "basic_pitch/{}.npz"),
    "face_landmarks": with_pictures("osf/lm_model0_opt.onnx", "input", face_crops, 24),
    "mobilenet_v3_detector": with_pictures("osf/mnv3_detection_opt.onnx", "input", face_crops, 24),
    "yolox_nano": with_pictures("odd/yolox_nano.onnx", "images", large_photographs, 10),
    "squeezenet_fp16": with_pictures("odd/squeezenet_fp16.onnx", "data_0", half_precision_crops, 24),
    "keyword_saved_model": with_data_files("kws/saved_model", "kws/{}.npz"),
    "dtln_saved_model": with_data_files("dtln/saved_model", "dtln/saved_model_{}.npz"),
    "basic_pitch_saved_model": with_data_files("basic_pitch/saved_model", "basic_pitch/{}.npz"),
}
"""Functions that create the cases of trained models from other projects."""

NAMES = (*ONNX, "digits_nested", *SEEDED, *BLOCKS, *FURTHER, *SAVED_MODELS, *TENSORFLOW, *SHARED)
"""All models, in the order of the table."""
