"""The architectures of `peers.py`, each with samples to calibrate on and others to measure with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import onnx
from calibration_models import keywords, noise, photographs
from oracle import LIGHT, ROOT, light, lstm, transformer, truth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Arrays = dict[str, np.ndarray]
"""Samples by input, along the first axis; without axes where all samples have the same value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An architecture.

    Attributes:
        name: What tables call it.
        model: Its float model, whose ops have names.
        pool: Samples that calibration draws from.
        held_out: Samples that no calibration sees.
        samples: How many samples a calibration takes.
    """

    name: str
    model: Path
    pool: Arrays
    held_out: Arrays
    samples: int

    def draw(self, number: int, path: Path) -> Path:
        """Writes the samples of draw `number`, in the order of the pool; returns the path."""
        rng = np.random.default_rng(number)
        count = max(len(array) for array in self.pool.values() if array.ndim)
        chosen = np.sort(rng.choice(count, self.samples, replace=False))
        np.savez(path, **{name: array[chosen] if array.ndim else array for name, array in self.pool.items()})
        return path


def cases(given: Path, folder: Path, only: list[str], left_out: list[str]) -> Iterator[Case]:
    """The architectures, their files in `folder`; what there is not is told in `left_out`."""

    def wanted(name: str) -> bool:
        return not only or name in only

    def case(name: str, message: onnx.ModelProto, pool: Arrays, held_out: Arrays, samples: int) -> Case:
        message = upgraded(message)
        truth.name_ops(message)
        path = folder / f"{name}.onnx"
        onnx.save(message, path)
        return Case(name=name, model=path, pool=pool, held_out=held_out, samples=samples)

    for name in ("digits_cnn", "digits_cnn_bn", "digits_rnn"):
        if wanted(name):
            stem = ROOT / "sample_models" / name.removesuffix("_bn")
            pool, others = _read(f"{stem}_calib.npz"), _read(f"{stem}_eval.npz")
            image = {"image": others["image"][:200]}
            yield case(name, onnx.load(ROOT / f"sample_models/{name}.onnx"), pool, image, 80)
    if given.is_dir():
        yield from (case(name, *make(given, folder)) for name, make in REAL.items() if wanted(name))
        left_out.append("qlstm_tract: it is quantized already")
    else:
        left_out.append(f"face detector, keyword net and silero: there is no folder {given}")
    for path in sorted(LIGHT.glob("*.onnx")):
        if wanted(path.stem):
            message = _without_softmax(light(path))
            key = _key(message)
            pictures = np.concatenate(list(noise(24)))
            yield case(path.stem, message, {key: pictures[:16]}, {key: pictures[16:]}, 8)
    rng = np.random.default_rng(3)
    seeded = {
        "transformer": (transformer, 64),
        "lstm": (lstm, 64),
        # 403 MB of weights
        "large_transformer": (partial(transformer, layers=8, width=1024, heads=16, length=64, hidden=4096), 16),
    }
    for name, (made, samples) in seeded.items():
        if wanted(name):
            message = made()
            shape = [size.dim_value for size in message.graph.input[0].type.tensor_type.shape.dim][1:]
            values = rng.standard_normal((160, *shape)).astype(np.float32)
            yield case(name, message, {"x": values[:80]}, {"x": values[80:]}, samples)


def upgraded(message: onnx.ModelProto) -> onnx.ModelProto:
    """The model at opset 13, the first with scales per channel, if it is older, its initializers no inputs."""
    if next(one.version for one in message.opset_import if not one.domain) >= 13:  # noqa: PLR2004  # named above
        return message
    constants = {value.name for value in message.graph.initializer}
    inputs = [info for info in message.graph.input if info.name not in constants]
    message.ir_version = max(message.ir_version, 8)
    del message.graph.input[:]
    message.graph.input.extend(inputs)
    return onnx.version_converter.convert_version(message, 13)


def _without_softmax(message: onnx.ModelProto) -> onnx.ModelProto:
    """The net without the Softmax that ends it, which makes ones and zeros of what random weights give."""
    graph = message.graph
    last = next((node for node in graph.node if node.output[0] == graph.output[0].name), None)
    if last is not None and last.op_type == "Softmax":
        graph.node.remove(last)
        graph.output[0].name = last.input[0]
        graph.output[0].type.tensor_type.ClearField("shape")
    return message


Real = tuple[onnx.ModelProto, Arrays, Arrays, int]
"""A trained model, two sets of samples, how many a calibration takes."""


def _face_detector(given: Path, _: Path) -> Real:
    detector = onnx.load(given / "ultraface/version-RFB-320.onnx")
    faces, others = (np.concatenate(list(photographs(given, *span))) for span in ((100, 0), (25, 20)))
    return detector, {"input": faces}, {"input": others}, 40


def _silero_vad(given: Path, _: Path) -> Real:
    voice = _read(given / "silero_vad.npz")
    even, odd = ({k: v[start::2] if v.ndim else v for k, v in voice.items()} for start in (0, 1))
    return onnx.load(given / "silero_vad_16k_op15.onnx"), even, odd, 80


def _keyword_net(given: Path, folder: Path) -> Real:
    keywords(given, folder / "converted.onnx")
    net = onnx.load(folder / "converted.onnx")
    pool, words = (next(a for a in _read(given / f"kws/{n}.npz").values() if a.ndim > 1) for n in ("calib", "eval"))
    return net, {_key(net): pool}, {_key(net): words}, 80


REAL: dict[str, Callable[[Path, Path], Real]] = {
    "face_detector": _face_detector,
    "silero_vad": _silero_vad,
    "keyword_net": _keyword_net,
}
"""Functions that create the trained models from their folder and one for temporary files, by name."""


def _read(path: Path | str) -> Arrays:
    with np.load(path) as arrays:
        return dict(arrays)


def _key(message: onnx.ModelProto) -> str:
    """The name of its first true input."""
    constants = {value.name for value in message.graph.initializer}
    return next(info.name for info in message.graph.input if info.name not in constants)
