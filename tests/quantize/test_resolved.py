"""Models that rules alone cannot have as they want: each is resolved, reported, and computes what numpy computes."""

import io
import json
import re

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from support.rule_files import input_rule, rule_text, weight_rule

import graphquant as gq
from graphquant.ir import TensorRef, Use
from graphquant.numerics import QParams, dequantize, qparams_from_scale, quantize
from graphquant.quantize import plan_to_json
from graphquant.visualize.json_export import InsertResult
from graphquant.visualize.tables import make_console
from graphquant.visualize.text import result_view

OFF = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
ALL = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 3, 8, 8)).astype(np.float32)
W = RNG.standard_normal((4, 3, 3, 3)).astype(np.float32)
B = np.array([0.1, 3.0, -0.2, 1.0], np.float32)
IN, OUT = "float[N,3,8,8] x", "float[N,4,6,6]"

SIXTEEN_BITS = """
[scheme.weight]
dtype = "int16"
narrow = true
per = "{per}"
observe = "absmax"
[scheme.activation]
dtype = "int16"
observe = "absmax"
"""
CONV_RULES = weight_rule("conv") + input_rule("conv") + rule_text("output", '{ kind = "conv" }', quantize="activation")


class Case:
    """A model, quantized on its data."""

    def __init__(self, folder, text, rules, feeds, **constants):
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 13]> g {text}')
        for name, value in constants.items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
        self.folder, self.rules, self.feeds = folder, rules, feeds
        onnx.save(model, folder / "model.onnx")
        np.savez(folder / "data.npz", **feeds)
        self.result = gq.insert(folder / "model.onnx", rules=rules, data=str(folder / "data.npz"), validate=False)
        self.path = self.result.save(folder / "quantized.onnx")

    def params(self, name, use=None) -> QParams:
        """Scale and zero point of a tensor, or of its copy for one consumer."""
        sites = [
            pair
            for pair in self.result.inserted
            if pair.site.tensor.op == name and (use is None or use in {read.op for read in pair.site.uses})
        ]
        assert len(sites) == 1, [str(pair.site.tensor) for pair in self.result.inserted]
        return sites[0].params

    def rounded(self, name, values, use=None):
        """Values as their pair leaves them, float64."""
        params = self.params(name, use)
        return dequantize(quantize(values, params), params).astype(np.float64)

    def run(self, level=OFF, path=None):
        """Return the outputs of ONNX Runtime."""
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        session = onnxruntime.InferenceSession(str(path or self.path), options, providers=["CPUExecutionProvider"])
        return session.run(None, self.feeds)

    def choices(self, name):
        """Return the notes on the scale of a tensor and of all its copies."""
        pairs = zip(self.result.inserted, self.result.scale_reasons, strict=True)
        return [reason for pair, reasons in pairs if pair.site.tensor.op == name for reason in reasons]

    def codes(self, backend):
        """The findings."""
        return [finding.code for finding in gq.check(self.path, backend=backend).findings]


def conv_nchw(x, w, b):
    """A convolution without padding, float64: x (N, C, H, W), w (M, C, k, k), b (M,)."""
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=(2, 3))
    return np.einsum("nchwij,mcij->nmhw", windows, w) + b.reshape(-1, 1, 1)


def steps_between(first, second, params):
    """Return the largest difference of two results in steps, and the share of values that differ."""
    step_distance = np.rint(np.abs(first.astype(np.float64) - second) / float(params.scale))
    return step_distance.max(), (step_distance > 0).mean()


def small_channel():
    """A weight with one channel that is next to nothing, as pruning leaves them, beside an ordinary bias."""
    weight = W.copy()
    weight[1] *= 1e-11
    return weight


# -- a bias that overflows -------------------------------------------------------------------------


@pytest.mark.parametrize("rules", ["onnxruntime", "qnn"])
def test_a_bias_that_overflows_int32(tmp_path, rules):
    """The weight's scale is raised in the channel that needs it and no other, and both runs are numpy's reference."""
    case = Case(tmp_path, f"({IN}) => ({OUT} y) {{ y = Conv(x, w, b) }}", rules, {"x": X}, w=small_channel(), b=B)
    x, w = case.params("x"), case.params("w")
    steps = np.abs(B) / (float(x.scale) * w.scale.astype(np.float64))
    least = np.abs(W).max((1, 2, 3)) / 127
    np.testing.assert_allclose(w.scale[[0, 2, 3]], least[[0, 2, 3]], rtol=1e-6)
    output = io.StringIO()
    make_console(file=output).print(result_view(case.result))
    assert ("changed: w:0: " in output.getvalue()) == (rules == "onnxruntime")
    if rules == "onnxruntime":
        assert 2**31 * (1 - 1e-5) < steps[1] < 2**31 - 1
        note = case.result.site_notes[TensorRef("", "w")]
        assert re.search("scale .*raised .* 1 of 4 channels .*b:0 .*int32", note)
    else:  # the smallest range of QNN makes room by itself
        assert steps[1] < 2**31 - 1
        assert re.search("widened .* 0.0001 in 1 of 4 channels", "\n".join(case.choices("w")))
        assert case.params("b").scale.tolist() == pytest.approx((float(x.scale) * w.scale).tolist())
    expected = conv_nchw(case.rounded("x", X), case.rounded("w", small_channel()), B)
    for level in (OFF, ALL):
        [actual] = case.run(level)
        step_distance, share = steps_between(actual, case.rounded("y", expected), case.params("y"))
        assert step_distance <= 1
        assert share < 0.01
        assert np.abs(actual[:, 1] - B[1]).max() <= float(case.params("y").scale)
    assert case.codes(rules) == []


def insert_given_scale(folder, rules):
    """Insert with a plan that gives the scale of the weight: that of its values."""
    data = plan_to_json(gq.plan(folder / "model.onnx", rules=rules))
    for site in data["sites"]:
        if site["tensor"]["op"] == "w":
            site["scale"] = (np.abs(small_channel()).max((1, 2, 3)) / 127).tolist()
    (folder / "plan.json").write_text(json.dumps(data))
    return gq.insert(folder / "model.onnx", plan=folder / "plan.json", data=str(folder / "data.npz"), validate=False)


def test_without_the_solver_that_bias_is_lost(tmp_path):
    """The same weight with the scale of its values alone, as a plan gives it: `check` finds it, the bias is gone."""
    case = Case(
        tmp_path, f"({IN}) => ({OUT} y) {{ y = Conv(x, w, b) }}", "onnxruntime", {"x": X}, w=small_channel(), b=B
    )
    inserted_result = insert_given_scale(tmp_path, "onnxruntime")
    case.path = inserted_result.save(tmp_path / "dictated.onnx")
    assert case.codes("onnxruntime") == ["GQ104"]
    [actual] = case.run(ALL)
    assert np.abs(actual[:, 1] - B[1]).max() > 1
    (conflict,) = inserted_result.conflicts
    assert conflict.rules == ("weight", "conv-bias")
    assert conflict.tensors == (TensorRef("", "w"), TensorRef("", "b"))


def test_weight_scale_of_the_plan_is_not_changed(tmp_path):
    """If a plan gives the weight's scale, an int32 bias that does not fit stays float, and a change names both."""
    case = Case(tmp_path, f"({IN}) => ({OUT} y) {{ y = Conv(x, w, b) }}", "qnn", {"x": X}, w=small_channel(), b=B)
    inserted_result = insert_given_scale(tmp_path, "qnn")
    [conflict] = inserted_result.conflicts
    assert conflict.rules == ("conv-weight", "bias")
    assert conflict.tensors == (TensorRef("", "w"), TensorRef("", "b"))
    assert "bias stays float" in conflict.resolution
    assert "beyond int32" in inserted_result.skips[-1].reason
    report = InsertResult.of(inserted_result).as_json()
    assert report["conflicts"][0]["rules"] == ["conv-weight", "bias"]
    case.path = inserted_result.save(tmp_path / "dictated.onnx")
    expected = conv_nchw(case.rounded("x", X), case.rounded("w", small_channel()), B)
    assert steps_between(case.run()[0], case.rounded("y", expected), case.params("y"))[0] <= 1


@pytest.mark.parametrize("per", ["channel", "tensor"])
def test_weights_and_activations_of_16_bits(tmp_path, per):
    """A float bias is made int32 with these scales too, by onnxruntime; they are raised as far as that takes."""
    bias = B * 40
    case = Case(
        tmp_path,
        f"({IN}) => ({OUT} y) {{ y = Conv(x, w, b) }}",
        SIXTEEN_BITS.format(per=per) + CONV_RULES,
        {"x": X},
        w=W,
        b=bias,
    )
    x, w = case.params("x"), case.params("w")
    steps = np.abs(bias) / (float(x.scale) * w.scale.astype(np.float64))
    assert steps.max() < 2**31 - 1
    channels = " in 2 of 4 channels" if per == "channel" else ""
    assert re.search(f"raised .*times{channels} .*b:0 .*int32", case.result.site_notes[TensorRef("", "w")])
    expected = conv_nchw(X.astype(np.float64), W.astype(np.float64), bias)
    noise = case.run(ALL)[0] - expected
    assert 10 * np.log10((expected**2).mean() / (noise**2).mean()) > 70


# -- what consumers need with different scales -----------------------------------------------------


def test_a_shared_bias_that_needs_two_scales(tmp_path):
    """Three consumers, two scales: two copies, named in order; each computes what numpy computes."""
    feeds = {"x": X, "t": X * 5}
    case = Case(
        tmp_path,
        f"({IN}, float[N,3,8,8] t) => ({OUT} y, {OUT} z, {OUT} v) "
        "{ y = Conv(x, w, b) z = Conv(t, w, b) v = Conv(x, w, b) }",
        "qnn",
        feeds,
        w=W,
        b=B,
    )
    copies = [pair for pair in case.result.inserted if pair.site.tensor.op == "b"]
    assert [(entry.output.op, entry.site.uses) for entry in copies] == [
        ("b/quant/bias/dequant", (Use("", "y", 2), Use("", "v", 2))),
        ("b/quant/bias_1/dequant", (Use("", "z", 2),)),
    ]
    copy_notes = [entry for entry in case.choices("b") if "2 copies" in entry]
    assert [re.findall(r"\w\[2\]", entry) for entry in copy_notes] == [["y[2]", "v[2]"], ["z[2]"]]
    (change,) = case.result.changes
    assert change.tensor == TensorRef("", "b")
    assert "2 copies" in change.message
    stored = {initializer.name for initializer in onnx.load(case.path).graph.initializer}
    assert {"b/quant/bias/int32", "b/quant/bias_1/int32"} <= stored
    assert "b" not in stored
    for name, source, actual in zip("yzv", "xtx", case.run(ALL), strict=True):
        data, weight, bias = case.params(source), case.params("w"), case.params("b", name)
        np.testing.assert_allclose(bias.scale, float(data.scale) * weight.scale, rtol=1e-6)
        rounded = case.rounded(source, feeds[source]), case.rounded("w", W), case.rounded("b", B, name)
        expected = case.rounded(name, conv_nchw(*rounded))
        step_distance, share = steps_between(actual, expected, case.params(name))
        assert step_distance <= 1
        assert share < 0.01
    assert case.codes("qnn") == []


def test_a_shared_weight_of_which_one_consumer_needs_another_scale(tmp_path):
    """The bias of one of two consumers does not fit: that one gets a copy of the weight, the other keeps its scale."""
    case = Case(
        tmp_path,
        f"({IN}, float[N,3,8,8] t) => ({OUT} y, {OUT} z) {{ y = Conv(x, w, b) z = Conv(t, w, big) }}",
        "onnxruntime",
        {"x": X, "t": X},
        w=W * 1e-9,
        b=B * 1e-9,
        big=B * 10,
    )
    np.testing.assert_allclose(case.params("w", "y").scale, 1e-9 * np.abs(W).max((1, 2, 3)) / 127, rtol=1e-5)
    assert (case.params("w", "z").scale > 1e-9 * np.abs(W).max() / 127).all()
    assert re.search(r"copy for z\[1\]: .*scale .*raised", case.result.site_notes[TensorRef("", "w")])
    for name, source, bias in (("y", "x", B * 1e-9), ("z", "t", B * 10)):
        expected = conv_nchw(case.rounded(source, X), case.rounded("w", W * 1e-9, name), bias)
        actual = dict(zip("yz", case.run(ALL), strict=True))[name]
        assert steps_between(actual, case.rounded(name, expected), case.params(name))[0] <= 1
    assert case.codes("onnxruntime") == []


# -- a tie that breaks a Relu ----------------------------------------------------------------------

JOINED = (
    f"({IN}, {OUT} t) => (float[N,4,4,4] y) "
    "{ c = Conv(x, w, b) r = Relu(c) j = Concat<axis = 1>(r, t) y = Conv(j, v, b) }"
)
RESIZED = (
    "(float[1,3,8,8] x) => (float[1,4,8,8] y) "
    '{ c = Conv(x, w, b) r = Relu(c) s = Resize<mode = "cubic">(r, , , sizes) y = Conv(s, u, b) }'
)


@pytest.mark.parametrize("backend", ["qnn", "onnxruntime"])
def test_a_tie_that_breaks_a_relu(tmp_path, backend):
    """Relu shares its scale with what is below 0: it stays, and the convolution before it keeps running on integers."""
    if backend == "qnn":
        feeds = {"x": X, "t": RNG.standard_normal((16, 4, 6, 6)).astype(np.float32)}
        case = Case(tmp_path, JOINED, "qnn", feeds, w=W, b=B, v=RNG.standard_normal((4, 8, 3, 3)).astype(np.float32))
    else:
        sizes = np.array([1, 4, 10, 10])
        u = RNG.standard_normal((4, 4, 3, 3)).astype(np.float32)
        case = Case(tmp_path, RESIZED, "onnxruntime", {"x": X[:1]}, w=W, b=B, u=u, sizes=sizes)
    relu, before = case.params("r"), case.params("c")
    assert int(relu.zero_point) > 0
    assert (before.scale, before.zero_point) == (relu.scale, relu.zero_point)
    tied = {
        "qnn": "shares .*t:0,.* 'concat-output' .*j:0",
        "onnxruntime": "shares .*s:0, by rule 'pass-through'",
    }
    assert any(re.search(tied[backend], reason) for reason in case.choices("r"))
    assert any(re.search("pair of r:0, because r .*fused", reason) for reason in case.choices("c"))
    assert [str(change.tensor) for change in case.result.changes if "pair of r:0" in change.message] == ["c:0"]
    assert all(skip.tensor.op != "c" for skip in case.result.skips)
    statuses = {verdict.op: verdict.status for verdict in gq.check(case.path, backend=backend).verdicts}
    assert statuses["c"] == "int8"
    assert case.codes(backend) == []
    without = tmp_path / "without.onnx"
    model = onnx.load(case.path)
    next(node for node in model.graph.node if node.op_type == "Relu").input[0] = "c"
    onnx.save(model, without)
    np.testing.assert_array_equal(case.run(OFF)[0], case.run(OFF, without)[0])
    x = case.feeds["x"]
    c = conv_nchw(case.rounded("x", x), case.rounded("w", W), case.rounded("b", B, "c") if backend == "qnn" else B)
    actual = onnxruntime_value(case, "r/quant/dequant")
    step_distance, share = steps_between(actual, case.rounded("r", np.maximum(c, 0)), relu)
    assert step_distance <= 1
    assert share < 0.01


def onnxruntime_value(case, name):
    """Return the value of a tensor inside the written model."""
    model = onnx.load(case.path)
    node = next(node for node in model.graph.node if node.name == name)
    model.graph.output.append(onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, None))
    onnx.save(model, case.folder / "inside.onnx")
    return case.run(OFF, case.folder / "inside.onnx")[-1]


def test_relu_without_a_tie_is_fused(tmp_path):
    """No pair is put between an op and its Relu where integers end at 0."""
    case = Case(tmp_path, f"({IN}) => ({OUT} y) {{ c = Conv(x, w, b) y = Relu(c) }}", "onnxruntime", {"x": X}, w=W, b=B)
    assert [pair.site.tensor.op for pair in case.result.inserted] == ["x", "w", "b", "y"]
    statuses = {verdict.op: verdict.status for verdict in gq.check(case.path, backend="onnxruntime").verdicts}
    assert statuses == {"c": "int8", "y": "fused"}


def test_a_clip_whose_ends_no_integer_has(tmp_path):
    """The range [-1, 1] is half a step off: the Clip runs by itself between two pairs, the convolution on integers."""
    ends = {"low": np.float32(-1), "high": np.float32(1)}
    case = Case(
        tmp_path,
        f"({IN}) => ({OUT} y) {{ c = Conv(x, w, b) y = Clip(c, low, high) }}",
        "onnxruntime",
        {"x": X},
        w=W,
        b=B,
        **ends,
    )
    assert {pair.site.tensor.op for pair in case.result.inserted} == {"x", "w", "b", "c", "y"}
    statuses = {verdict.op: verdict.status for verdict in gq.check(case.path, backend="onnxruntime").verdicts}
    assert statuses["c"] == "int8"
    expected = np.clip(conv_nchw(case.rounded("x", X), case.rounded("w", W), B), -1, 1)
    for level in (OFF, ALL):
        step_distance, share = steps_between(case.run(level)[0], case.rounded("y", expected), case.params("y"))
        assert step_distance <= 1
        assert share < 0.01


@pytest.mark.parametrize("high", np.float32([0.1, 0.7, 1.3, 5.3, 6.0, 7.7, 21.3, 36.6]).tolist())
def test_clip_is_fused_for_any_upper_limit(tmp_path, high):
    """Rounding the scale to float32 never makes the integers reach beyond a Clip that has all the range."""
    case = Case(
        tmp_path,
        f"({IN}) => ({OUT} y) {{ c = Conv(x, w, b) y = Clip(c, low, high) }}",
        "onnxruntime",
        {"x": X * 10},
        w=W,
        b=B,
        low=np.float32(0),
        high=np.float32(high),
    )
    statuses = {verdict.op: verdict.status for verdict in gq.check(case.path, backend="onnxruntime").verdicts}
    assert statuses == {"c": "int8", "y": "fused"}
    params = case.params("y")
    assert float(params.scale) * 255 <= high
    assert qparams_from_scale(params.scale, params.zero_point, params.type).range.high == pytest.approx(high)
