"""Files of ranges in and out, and ranges that a quantized model keeps while it is quantized for another backend."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import graphquant as gq
from graphquant.errors import DataError, NeedsDataError, UsageError
from graphquant.formats.onnx import create_runner
from graphquant.quantize import SkipCode, range_files
from graphquant.quantize.range_files import read_range_file

pytestmark = pytest.mark.usefixtures("rules_alone")


@pytest.fixture
def quantized(samples: Path, tmp_path: Path) -> gq.Result:
    """Return the sample CNN with ranges of data."""
    return gq.insert(
        samples / "digits_cnn.onnx",
        data=str(samples / "digits_cnn_calib.npz"),
        rules=["onnxruntime"],
        algorithms=["not bias-correction"],
        min_sqnr="none",
    )


def stored(model: gq.Model) -> dict[str, tuple[Any, ...]]:
    """Return type, scales, zero points and limits of each tensor of a file."""
    outputs = [output for op in model.main.ops() for output in op.outputs]
    return {
        output.name: (
            output.dtype,
            output.quantization.scale.tolist(),
            output.quantization.zero_point.tolist(),
            [*output.quantization.low.tolist(), *output.quantization.high.tolist()],
        )
        for output in outputs
    }


def outputs_of(model: gq.Model, samples: Path) -> np.ndarray:
    """Return the outputs of the evaluation images."""
    images = np.load(samples / "digits_cnn_eval.npz")["image"][:32]
    (value,) = create_runner(model).run({"image": images}).values()
    return value


@pytest.mark.parametrize("suffix", [".encodings", ".json"])
def test_exported_ranges_give_the_same_model(quantized: gq.Result, samples: Path, tmp_path: Path, suffix: str) -> None:
    """A model with the ranges of an exported file, without data, has the same outputs to the bit."""
    path = quantized.export_ranges(tmp_path / f"ranges{suffix}")
    again = gq.insert(
        samples / "digits_cnn.onnx", rules=["onnxruntime"], algorithms=["not bias-correction"], ranges=path
    )
    assert len(again.inserted) == len(quantized.inserted)
    np.testing.assert_array_equal(outputs_of(again.model, samples), outputs_of(quantized.model, samples))


def test_tensorrt_caches(quantized: gq.Result, samples: Path, tmp_path: Path) -> None:
    """A calibration cache has the symmetric scale of each activation, and TensorRT's rules take it exactly."""
    cache = tmp_path / "trt.cache"
    model = gq.load(samples / "digits_cnn.onnx")
    plan = gq.plan(model, rules=["tensorrt"])
    names = {model.output(site.tensor).name for site in plan.sites if not site.parameter}
    lines = [f"{name}: {struct.pack('>f', 0.0625).hex()}" for name in sorted(names)]
    cache.write_text("\n".join(["TRT-8601-EntropyCalibration2", *lines, "unused: 00000000", ""]))
    result = gq.insert(samples / "digits_cnn.onnx", rules=["tensorrt"], ranges=cache)
    scales = {float(pair.params.scale) for pair in result.inserted if not pair.site.parameter}
    assert scales == {0.0625}
    written = result.export_ranges(tmp_path / "out.cache").read_text()
    assert sorted(written.splitlines()[1:]) == lines


def test_aimet_versions(tmp_path: Path) -> None:
    """Encodings of versions 0.6, 1.0 and 2.0 describe the same ranges; float encodings are skipped."""
    old = {"bitwidth": 8, "dtype": "int", "is_symmetric": "False", "scale": 0.5, "offset": -3, "min": -1.5, "max": 126}
    weight = {"bitwidth": 8, "dtype": "int", "is_symmetric": "True", "scale": 0.25, "offset": -128}
    strict = {**weight, "offset": -127}
    contents = [
        {
            "activation_encodings": {"x": [old], "f": [{"dtype": "float", "bitwidth": 16}]},
            "param_encodings": {"w": [weight, strict]},
        },
        {
            "version": "1.0.0",
            "activation_encodings": [
                {"name": "x", "bw": 8, "dtype": "INT", "is_sym": False, "scale": [0.5], "offset": [-3]},
                {"name": "f", "bw": 16, "dtype": "FLOAT"},
            ],
            "param_encodings": [
                {"name": "w", "bw": 8, "dtype": "INT", "is_sym": True, "scale": [0.25, 0.25], "offset": [-128, -128]}
            ],
        },
        {
            "version": "2.0.0",
            "encodings": [
                {"name": "x", "output_dtype": "uint8", "y_scale": 0.5, "y_zero_point": 3},
                {"name": "w", "output_dtype": "int8", "y_scale": [0.25, 0.25], "axis": 0},
            ],
        },
    ]
    for content in contents:
        path = tmp_path / "x.encodings"
        path.write_text(json.dumps(content))
        assert stored(read_range_file(path)) == {
            "x": ("uint8", [0.5], [3], []),
            "w": ("int8", [0.25, 0.25], [0, 0], []),
        }


def test_overrides_of_onnxruntime(tmp_path: Path) -> None:
    """Overrides have a scale with its type, or a range; entries without either are skipped."""
    path = tmp_path / "overrides.json"
    content = {
        "a": [{"quant_type": "QUInt8", "scale": 0.5, "zero_point": 7}],
        "b": [{"rmin": -1.0, "rmax": 3.0}],
        "c": [{"quant_type": "QInt16"}],
    }
    path.write_text(json.dumps(content))
    assert stored(read_range_file(path)) == {"a": ("uint8", [0.5], [7], []), "b": ("float32", [], [], [-1.0, 3.0])}


@pytest.mark.parametrize(
    "content",
    [
        *(b"\xff\xfe", b"", b"{", b"[]", b"3", b'{"a": 3}', b'{"a": [{"scale": -1}]}', b"[" * 100_000),
        *(b'{"activation_encodings": {"a": [{}]}}', b"TRT-8601\nx: zz\n"),
        b'{"a": [{"scale": 1, "quant_type": "QFloat8"}]}',
        b"TRT-8601\nx: 3f80000000\n",
        b'{"a": [{"scale": 1, "zero_point": 1' + b"0" * 30 + b"}]}",
        b'{"a": [{"scale": 1, "zero_point": -1}]}',
        b'{"a": [{"scale": 1e300}]}',
        b'{"a": [{"rmin": -1e300, "rmax": 1}]}',
        b'{"activation_encodings": [{"name": "a", "bw": 8, "scale": [1, 2], "offset": [0]}]}',
        b'{"activation_encodings": [{"name": "a", "bw": 8, "scale": [], "offset": []}]}',
        b'{"encodings": [{"name": "a", "y_scale": 1, "y_zero_point": 1.5, "output_dtype": "int8"}]}',
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes) -> None:
    """Other files, and damaged ones, are data errors that name the file."""
    path = tmp_path / "ranges.cache"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"ranges\.cache"):
        read_range_file(path)


def test_files_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device, whose size is not known, is not read beyond the limit."""
    monkeypatch.setattr(range_files, "MAX_FILE_BYTES", 1 << 10)
    with pytest.raises(DataError, match="/dev/zero is over"):
        read_range_file(Path("/dev/zero"))


def test_ranges_of_a_quantized_model(quantized: gq.Result, samples: Path, tmp_path: Path) -> None:
    """The float model takes the activation ranges of its quantized model, and a float model has none."""
    path = quantized.save(tmp_path / "q.onnx")
    again = gq.insert(
        samples / "digits_cnn.onnx", rules=["onnxruntime"], algorithms=["not bias-correction"], ranges=path
    )
    np.testing.assert_array_equal(outputs_of(again.model, samples), outputs_of(quantized.model, samples))
    with pytest.raises(UsageError, match="no quantization"):
        gq.insert(samples / "digits_cnn.onnx", ranges=samples / "digits_cnn.onnx")


def test_kept_ranges(quantized: gq.Result, samples: Path, tmp_path: Path) -> None:
    """A quantized model is quantized again without data: to the bit with the same rules, and with others if it can."""
    path = quantized.save(tmp_path / "q.onnx")
    same = gq.insert(path, rules=["onnxruntime"], algorithms=["not bias-correction"], requantize=True, keep_ranges=True)
    np.testing.assert_array_equal(outputs_of(same.model, samples), outputs_of(quantized.model, samples))
    moved = gq.insert(
        path, rules=["openvino"], requantize=True, keep_ranges=True, data=str(samples / "digits_cnn_calib.npz")
    )
    assert len(moved.tflite_ranges.transferred) >= 10
    with pytest.raises(UsageError, match="requantize"):
        gq.insert(path, keep_ranges=True)
    with pytest.raises(UsageError, match="no quantization"):
        gq.insert(samples / "digits_cnn.onnx", keep_ranges=True, requantize=True)


def test_the_command(cli: Callable[..., Any], samples: Path, tmp_path: Path) -> None:
    """--export-ranges writes a file that --ranges reads; other suffixes and existing files are refused."""
    model, ranges = samples / "digits_cnn.onnx", tmp_path / "r.encodings"
    data = ("--data", samples / "digits_cnn_calib.npz")
    cli("insert", model, *data, "-o", tmp_path / "a.onnx", "--export-ranges", ranges)
    cli("insert", model, "-o", tmp_path / "b.onnx", "--ranges", ranges)
    assert "r.txt" in cli("insert", model, "-o", tmp_path / "c.onnx", "--export-ranges", "r.txt", code=2).stderr
    result = cli("insert", model, *data, "-o", tmp_path / "c.onnx", "--export-ranges", ranges, code=2)
    assert "r.encodings" in result.stderr
    assert not tmp_path.joinpath("c.onnx").exists()


@pytest.fixture
def branching(tmp_path: Path) -> Path:
    """Return an ONNX model whose branches both have a tensor `r`, each with values of its own size."""
    text = """<ir_version: 8, opset_import: ["": 13]> g (float[2,4,6,6] x, bool rare) => (float[2,4,6,6] y) {
        a = Conv(x, w0)
        b = Relu(a)
        z = If (rare) <
            then_branch = yes () => (float[2,4,6,6] t) { c = Conv(b, w1) r = Relu(c) d = Conv(r, w2) t = Relu(d) },
            else_branch = no () => (float[2,4,6,6] f) { e = Conv(b, w3) r = Relu(e) h = Conv(r, w2) f = Relu(h) }>
        y = Conv(z, w0)
    }"""
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    for index, size in enumerate((1, 1, 1, 50)):
        weight = size * rng.normal(size=(4, 4, 1, 1)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weight, f"w{index}"))
    onnx.save(model, tmp_path / "net.onnx")
    images, flags = rng.normal(size=(16, 2, 4, 6, 6)).astype(np.float32), np.arange(16) % 2 > 0
    np.savez(tmp_path / "both.npz", x=images, rare=flags)
    np.savez(tmp_path / "one.npz", x=images, rare=np.zeros(16, bool))
    return tmp_path / "net.onnx"


def activation_scales(result: gq.Result) -> dict[str, float]:
    """Return the scale of each quantized activation by tensor."""
    pairs = [pair for pair in result.inserted if not pair.site.parameter]
    return {str(pair.site.tensor): float(np.asarray(pair.params.scale).item()) for pair in pairs}


def test_equal_names_in_branches(branching: Path) -> None:
    """Tensors of one name in two branches take each the range of its own branch."""
    first = gq.insert(branching, data=f"{branching.parent / 'both.npz'}", rules="onnxruntime", min_sqnr="none")
    again = gq.insert(branching, ranges=first.model, rules="onnxruntime", validate=False)
    scales = activation_scales(first)
    assert scales["z/else_branch/r:0"] > 10 * scales["z/then_branch/r:0"]
    assert activation_scales(again) == scales


def test_name_like_one_of_a_branch(branching: Path) -> None:
    """Two tensors with one name in the file are an error, because the file has a single range for a name."""
    model = onnx.load(branching)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["z/then_branch/r" if name == "b" else name for name in names]
    for branch in (attribute.g for node in model.graph.node for attribute in node.attribute if node.op_type == "If"):
        branch.node[0].input[0] = "z/then_branch/r"
    onnx.save(model, branching)
    data = f"{branching.parent / 'both.npz'}"
    result = gq.insert(branching, data=data, rules="onnxruntime", min_sqnr="none")
    with pytest.raises(UsageError, match=re.escape("'z/then_branch/r'")):
        result.export_ranges(branching.parent / "ranges.encodings")


def test_branch_without_given_ranges(branching: Path) -> None:
    """A branch that no range is given for stays float, and other tensors without a range are an error."""
    first = gq.insert(branching, data=f"{branching.parent / 'one.npz'}", rules="onnxruntime", min_sqnr="none")
    again = gq.insert(branching, ranges=first.model, rules="onnxruntime", validate=False)
    assert activation_scales(again) == activation_scales(first)
    assert {str(tensor) for tensor in again.tflite_ranges.missing} >= {"z/then_branch/r:0", "z/then_branch/t:0"}
    assert SkipCode.RANGE in {skip.code for skip in again.skips if str(skip.tensor) == "z/then_branch/r:0"}
    uses = [
        {(str(pair.site.tensor), use) for pair in result.inserted for use in pair.site.uses}
        for result in (first, again)
    ]
    assert uses[0] == uses[1]
    partial = gq.insert(
        branching, data=f"{branching.parent / 'both.npz'}", exclude=["b:0"], rules="onnxruntime", min_sqnr="none"
    )
    with pytest.raises(NeedsDataError):
        gq.insert(branching, ranges=partial.model, rules="onnxruntime", validate=False)
