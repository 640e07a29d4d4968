"""Mutated models: `check` returns a report or raises a GraphQuantError."""

import importlib.util
import random
from pathlib import Path

import onnx
import pytest

import graphquant as gq
from graphquant.backends import BACKENDS, check_quantized_model
from graphquant.errors import InternalError
from graphquant.visualize import check_report as view

HERE = Path(__file__).parent


def import_test_module(path):
    """Import a test module by name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


fuzz, oracle = import_test_module(HERE.parent / "test_fuzz.py"), import_test_module(HERE / "test_oracle.py")

# onnx's own shape inference aborts the process on a Split whose attribute names fewer outputs than it has.
NAMES = [name for name in oracle.CASES if "split" not in name]


@pytest.mark.parametrize("start", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(100, 500, 100))])
def test_mutated_models(start, tmp_path):
    """A hundred mutated graphs, some inside an If, are checked for every backend."""
    ends = {"told": 0, "refused": 0}
    for seed in range(start, start + 100):
        rng = random.Random(seed)  # noqa: S311  # not a secret
        message = oracle.build_case(rng.choice(NAMES))[0]
        message = oracle.inside_if(message) if rng.random() < 0.3 else message
        fuzz.mutate_message(rng, message, rng.choice((1, 2, 4, 8)))
        (tmp_path / "model.onnx").write_bytes(fuzz.serialize(message))
        try:
            model = gq.load(tmp_path / "model.onnx")
            reports = [check_quantized_model(model, backend) for backend in (None, *BACKENDS)]
        except InternalError:
            pytest.fail(f"seed {seed} broke an invariant")
        except gq.GraphQuantError:
            ends["refused"] += 1
            continue
        ends["told"] += 1
        assert len(view.check_sarif(reports)["runs"][0]["results"]) == sum(len(report.findings) for report in reports)
        for report in reports:
            assert len(view.check_annotations(report).splitlines()) == len(report.findings)
    assert min(ends.values()) > 10


def test_reports_are_reproducible(tmp_path):
    """Reports of a model are equal each time it is loaded."""
    onnx.save(oracle.build_case("silu")[0], tmp_path / "model.onnx")
    first, second = (check_quantized_model(gq.load(tmp_path / "model.onnx"), "onnxruntime") for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", ["scale", "w"])
def test_strings_in_place_of_numbers(tmp_path, name):
    """A scale or weight of strings ends no check with an exception of numpy."""
    message = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1,2] x) => (float[1,2] y) <float scale = {0.1}, int8[2,2] w = {1,2,3,4}, uint8 zero = {0}> {
          q = QuantizeLinear(x, scale, zero)
          d = DequantizeLinear(q, scale, zero)
          v = DequantizeLinear(w, scale)
          y = MatMul(d, v)
        }""")
    tensor = next(tensor for tensor in message.graph.initializer if tensor.name == name)
    words = onnx.helper.make_tensor(name, onnx.TensorProto.STRING, tensor.dims, ["word"] * (4 if tensor.dims else 1))
    tensor.CopyFrom(words)
    onnx.save(message, tmp_path / "model.onnx")
    for backend in (None, *BACKENDS):
        assert check_quantized_model(gq.load(tmp_path / "model.onnx"), backend).findings is not None
