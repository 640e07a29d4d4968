"""Content of a model: its quantization ops with their numbers, and the tensors that stay float."""

import onnx
import onnx.parser
import pytest

from graphquant.analysis.model_summary import summarize_model
from graphquant.formats.onnx import load
from graphquant.formats.tensorflow import load as tf_load
from graphquant.ir import Graph
from graphquant.visualize.json_results import InspectResult
from graphquant.visualize.tables import render_text
from graphquant.visualize.text import summary_view

MODEL = """
<ir_version: 8, opset_import: ["": 13, "local": 1]>
g (float[1,3,4,4] x, float[1] t) => (float[1,2,4,4] y, float[1,4,4,4] z, float[1,3,4,4] k)
<
    float s = {0.5}, uint8 p = {128},
    int8[2,3,1,1] w = {1, 2, 3, 4, 5, 6}, float[2] ws = {0.25, 2}, int8[2] wp = {0, 0},
    float[4,3,1,1] v = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}
>
{
    q = QuantizeLinear (x, s, p)
    d = DequantizeLinear (q, s, p)
    r = Relu (d)
    wd = DequantizeLinear <axis = 0> (w, ws, wp)
    i = Identity (d)
    y = Conv (i, wd)
    z = Conv (r, v)
    tq = QuantizeLinear (x, t, p)
    k = Cast <to = 1> (tq)
}
<domain: "local", opset_import: ["": 13]>
idle (a) => (b) { b = Relu (a) }
"""


def test_readings_and_coverage(tmp_path):
    """A pair is one reading with its numbers; an op is quantized if all it multiplies is."""
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "model.onnx")
    summary = summarize_model(load(tmp_path / "model.onnx"))
    readings = {reading.op: reading for reading in summary.quantization_ops}
    assert list(readings) == ["d", "wd", "tq"]
    assert (str(readings["d"].tensor), len(readings["d"].consumers), readings["d"].type) == (
        "x:0",
        2,
        "DequantizeLinear",
    )
    params = readings["d"].params
    assert (params.type.name, params.scale, params.zero_point, params.axis) == ("uint8", 0.5, 128, None)
    params = readings["wd"].params
    assert (params.type.name, params.scale.tolist(), params.zero_point.tolist(), params.axis) == (
        "int8",
        [0.25, 2.0],
        [0, 0],
        0,
    )
    assert str(readings["wd"].tensor) == "w:0"
    assert readings["tq"].params is None
    assert [(op_coverage.op, op_coverage.quantized, op_coverage.reason) for op_coverage in summary.coverage] == [
        ("y", True, ""),
        ("z", False, "its input r:0 is float"),
    ]
    assert summary.op_types == {
        "Conv": 2,
        "DequantizeLinear": 2,
        "QuantizeLinear": 2,
        "Cast": 1,
        "Identity": 1,
        "Relu": 1,
    }
    assert list(summary.op_types)[:3] == ["Conv", "DequantizeLinear", "QuantizeLinear"]
    assert summary.unreachable_functions == ("local:idle",)


def test_two_pairs_on_one_tensor_show_op_and_readers(tmp_path):
    """If several pairs quantize a tensor, the text and the JSON have the op and the readers of each."""
    model = """<ir_version: 8, opset_import: ["": 13]>
    g (float[4] x) => (float[4] y, float[4] z) <float s = {0.5}, float t = {0.25}, uint8 p = {128}> {
        q = QuantizeLinear (x, s, p)
        first = DequantizeLinear (q, s, p)
        r = QuantizeLinear (x, t, p)
        second = DequantizeLinear (r, t, p)
        y = Relu (first)
        z = Neg (second)
    }"""
    onnx.save(onnx.parser.parse_model(model), tmp_path / "model.onnx")
    summary = summarize_model(load(tmp_path / "model.onnx"))
    lines = [line.split() for line in render_text(summary_view(summary)).splitlines()]
    assert [(line[1].strip(","), line[-1]) for line in lines if line[:1] == ["by"]] == [
        ("first", "y[0]"),
        ("second", "z[0]"),
    ]
    readers = [entry["readers"] for entry in InspectResult.model_validate(summary).as_json()["quantization"]]
    assert readers == [[{"graph": "", "op": "y", "slot": 0}], [{"graph": "", "op": "z", "slot": 0}]]


@pytest.mark.parametrize("number", ["s = {0}", "s = {-1}", "s = {0.0000000000000000000000000000000000000000000000001}"])
def test_numbers_that_mean_nothing(tmp_path, number):
    """A scale that is no positive number has no params, and is no traceback."""
    onnx.save(onnx.parser.parse_model(MODEL.replace("s = {0.5}", number)), tmp_path / "model.onnx")
    readings = summarize_model(load(tmp_path / "model.onnx")).quantization_ops
    assert [reading.params is None for reading in readings] == [True, False, True]


FAKE = """
node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } }
       attr { key: "shape" value { shape { dim { size: 2 } } } } }
node { name: "q" op: "FakeQuantWithMinMaxArgs" input: "x" attr { key: "min" value { f: LOW } }
       attr { key: "max" value { f: 127.5 } } attr { key: "num_bits" value { i: BITS } } }
versions { producer: 1000 }
"""


@pytest.mark.parametrize(
    ("low", "bits", "expected"),
    [("0.0", "8", ("int8", 0.5, -128)), ("-127.5", "8", ("int8", 1.0, 0)), ("127.5", "8", None), ("0.0", "99", None)],
)
def test_fake_quant(tmp_path, low, bits, expected):
    """Scale and zero point follow from the range as TensorFlow nudges it; damaged attributes give None."""
    (tmp_path / "model.pbtxt").write_text(FAKE.replace("LOW", low).replace("BITS", bits))
    (reading,) = summarize_model(tf_load(tmp_path / "model.pbtxt")).quantization_ops
    params = reading.params
    fake_quant_params = None if params is None else (params.type.name, float(params.scale), int(params.zero_point))
    assert fake_quant_params == expected
    assert (reading.op, str(reading.tensor)) == ("q", "x:0")


def test_a_summary_reads_the_ops_of_a_graph_a_bounded_number_of_times(tmp_path, monkeypatch):
    """A summary takes linear time: it lists the ops of the graph as often for 60 quantized tensors as for 2."""
    reads = []
    list_ops = Graph.ops
    monkeypatch.setattr(Graph, "ops", lambda graph: reads.append(graph.name) or list_ops(graph))
    counts = []
    for pairs in (2, 60):
        nodes = "\n".join(
            f"q{i} = QuantizeLinear (x{i}, s, p)\nx{i + 1} = DequantizeLinear (q{i}, s, p)" for i in range(pairs)
        )
        text = f"""<ir_version: 8, opset_import: ["": 13]>
            g (float[4] x0) => (float[4] x{pairs}) <float s = {{0.5}}, uint8 p = {{128}}> {{
            {nodes}
            }}"""
        onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
        model = load(tmp_path / "model.onnx")
        reads.clear()
        assert len(summarize_model(model).quantization_ops) == pairs
        counts.append(len(reads))
    assert counts[0] == counts[1]
