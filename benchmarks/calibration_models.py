"""The models and the data of `calibration.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def models(given: Path, folder: Path, samples: int) -> Iterator[tuple[str, Path, Path, Path | None]]:
    """Title, model, calibration data and data that calibration does not see."""
    if given.is_dir():
        detector, data, held_out = given / "ultraface/version-RFB-320.onnx", folder / "faces.npz", folder / "others.npz"
        path = folder / "detector.onnx"
        path.write_bytes(detector.read_bytes())
        np.savez(data, input=np.concatenate(list(photographs(given, samples))))
        np.savez(held_out, input=np.concatenate(list(photographs(given, 25, start=20))))
        yield "face detector", path, data, held_out
        keywords(given, folder / "keywords.onnx")
        key = onnx.load(folder / "keywords.onnx").graph.input[0].name
        for source, target in (("calib", "words.npz"), ("eval", "other_words.npz")):
            with np.load(given / f"kws/{source}.npz") as arrays:
                array = next(arrays[name] for name in arrays.files if arrays[name].ndim == 4)  # noqa: PLR2004  # NHWC
                np.savez(folder / target, **{key: array[:samples] if source == "calib" else array})
        yield "keyword net", folder / "keywords.onnx", folder / "words.npz", folder / "other_words.npz"
    resnet50(folder / "resnet50.onnx")
    np.savez(folder / "noise.npz", x=np.concatenate(list(noise(samples))))
    yield "ResNet-50", folder / "resnet50.onnx", folder / "noise.npz", None


def prepared(model: Path) -> Path:
    """The model as every contestant gets it: of an opset that all take, its BatchNorms folded."""
    import graphquant as gq
    from graphquant.api.plan import prepare_for_plan

    loaded = gq.load(model)
    path = model.with_name(f"{model.stem}.prepared.onnx")
    gq.save(prepare_for_plan(loaded, gq.plan(loaded)), path, force=True)  # what calibration runs
    return path


def photographs(folder: Path, count: int, start: int = 0) -> Iterator[np.ndarray]:
    """Face detector samples [1, 3, 240, 320]: photographs, each as it is and four times flipped and cropped."""
    rgb = np.load(folder / "ultraface/images.npz")["rgb"]
    rng = np.random.default_rng(0)
    made = 0
    while made < count:
        for picture in rgb[start:] if start else rgb[:20]:
            for variant in range(5):
                if made == count:
                    return
                made += 1
                view = picture[:, ::-1] if rng.random() < 0.5 and variant else picture  # noqa: PLR2004  # a coin
                if variant:
                    top, left = rng.integers(0, 25), rng.integers(0, 33)
                    rows = np.linspace(top, top + 215, 240).astype(int)
                    columns = np.linspace(left, left + 287, 320).astype(int)
                    view = view[rows][:, columns]
                yield ((view.astype(np.float32) - 127) / 128).transpose(2, 0, 1)[None]


def resnet50(path: Path) -> None:
    """A ResNet-50 with seeded weights, scaled so that activations keep their size, BatchNorms folded already."""
    rng = np.random.default_rng(1)
    nodes, weights = [], []

    def conv(x: str, name: str, channels: tuple[int, int], size: int, stride: int, gain: float = 2.0) -> str:
        shape = (channels[1], channels[0], size, size)
        scale = np.sqrt(gain / (channels[0] * size * size))
        weights.append(numpy_helper.from_array(rng.normal(0, scale, shape).astype(np.float32), f"{name}.weight"))
        bias = rng.normal(0, 0.1, channels[1]).astype(np.float32)
        weights.append(numpy_helper.from_array(bias, f"{name}.bias"))
        nodes.append(
            helper.make_node(
                "Conv",
                [x, f"{name}.weight", f"{name}.bias"],
                [name],
                name=name,
                kernel_shape=[size, size],
                strides=[stride, stride],
                pads=[size // 2] * 4,
            )
        )
        return name

    def op(kind: str, name: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    x = op("Relu", "stem/relu", conv("x", "stem", (3, 64), 7, 2))
    x = op("MaxPool", "stem/pool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            at, stride = f"s{stage}b{block}", 2 if stage and not block else 1
            y = op("Relu", f"{at}/r1", conv(x, f"{at}/c1", (channels, width), 1, 1))
            y = op("Relu", f"{at}/r2", conv(y, f"{at}/c2", (width, width), 3, stride))
            y = conv(y, f"{at}/c3", (width, 4 * width), 1, 1, gain=0.5)
            if not block:
                x = conv(x, f"{at}/down", (channels, 4 * width), 1, stride, gain=1.0)
            channels = 4 * width
            x = op("Relu", f"{at}/out", op("Add", f"{at}/add", y, x))
    x = op("Flatten", "flat", op("GlobalAveragePool", "pool", x))
    weights.append(numpy_helper.from_array(rng.normal(0, 0.02, (2048, 1000)).astype(np.float32), "fc.weight"))
    weights.append(numpy_helper.from_array(np.zeros(1000, np.float32), "fc.bias"))
    op("Gemm", "y", x, "fc.weight", "fc.bias")
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "resnet50",
        [info("x", TensorProto.FLOAT, [1, 3, 224, 224])],
        [info("y", TensorProto.FLOAT, [1, 1000])],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def keywords(folder: Path, path: Path) -> None:
    """The keyword net as ONNX: frozen by TensorFlow's TF1 loader, then converted."""
    import tensorflow as tf
    import tf2onnx

    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(folder / "kws/saved_model"))
        signature = meta.signature_def["serving_default"]
        (source,), (result,) = signature.inputs.values(), signature.outputs.values()
        frozen = tf.compat.v1.graph_util.convert_variables_to_constants(
            session, session.graph_def, [result.name.split(":")[0]]
        )
    tf2onnx.convert.from_graph_def(
        frozen, input_names=[source.name], output_names=[result.name], opset=17, output_path=str(path)
    )


def noise(count: int) -> Iterator[np.ndarray]:
    """Samples [1, 3, 224, 224]: smooth seeded noise, about as correlated as photographs."""
    rng = np.random.default_rng(2)
    for _ in range(count):
        coarse = rng.standard_normal((1, 3, 28, 28)).astype(np.float32)
        yield coarse.repeat(8, axis=2).repeat(8, axis=3) + 0.1 * rng.standard_normal((1, 3, 224, 224), np.float32)
