"""`graphquant check`: output and exit codes."""

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from support.onnx_models import load_onnx
from support.published_schemas import validate_sarif

import graphquant as gq
from graphquant.analysis.model_summary import summarize_model
from graphquant.api.inspect import explain
from graphquant.backends import BACKENDS, LINT_CODES
from graphquant.visualize.check_report import escape_annotation

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("run_onnxruntime", Path(__file__).with_name("run_onnxruntime.py"))
truth = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(truth)


@pytest.fixture
def partly_quantized_path(samples, tmp_path):
    """Write a model whose residual sum and final sum are not quantized."""
    data = str(samples / "digits_cnn_calib.npz")
    result = gq.insert(samples / "digits_cnn.onnx", data=data, samples=4, exclude=["/residual|stem|logits.bias/"])
    return result.save(tmp_path / "with, comma%.onnx")


def test_text(cli, partly_quantized_path):
    """The table names each float op, the reason and the fix. Findings give exit code 1."""
    shown = cli("check", partly_quantized_path, "--for", "onnxruntime", code=1).stdout
    assert re.search(r"\b\d+ of \d+ ops", shown.splitlines()[0])
    kernels = set(truth.runs_as(truth.optimized(partly_quantized_path)).values())
    assert [kernel for kernel in kernels if truth.is_low(kernel) and kernel not in shown] == []
    assert "float-input" in shown or "between" in shown
    assert "GQ102" in shown


def test_float_model(cli, samples):
    """A model without quantization has no findings."""
    shown = cli("check", samples / "digits_cnn.onnx", "--for", "onnxruntime").stdout
    assert "`graphquant insert`" in shown
    assert "0 findings" in shown


@pytest.mark.usefixtures("rules_alone")
def test_ops_that_the_plan_keeps_in_float(cli, samples, tmp_path):
    """The barrier before a float op is no op of its own for check, explain and inspect: its weight is float."""
    weight = "pointwise/conv_weights_fused_bn"
    path, data = tmp_path / "digits_cnn.onnx", samples / "digits_cnn_calib.npz"
    options = ("--data", data, "--samples", 8, "--exclude", weight, "-o", path, "--report", tmp_path / "report.json")
    shown = cli("insert", samples / "digits_cnn.onnx", *options, "-v").stdout
    assert any(op.name == "pointwise/conv/barrier" for op in gq.load(path).main.ops())
    report = gq.check(path, backend="onnxruntime")
    verdicts = {verdict.op: verdict for verdict in report.verdicts}
    assert "pointwise/conv/barrier" not in verdicts
    assert "pointwise/conv:" in [line.split()[2] for line in shown.splitlines() if line.startswith("  in float")]
    ops = json.loads((tmp_path / "report.json").read_text())["ops"]
    assert [(op["op"], op["status"]) for op in ops] == [(verdict.op, verdict.status) for verdict in report.verdicts]
    assert weight in verdicts["pointwise/conv"].broken_rule.message
    assert not [finding for finding in report.findings if finding.op.startswith("pointwise")]
    uses = explain(gq.load(path), "pointwise/conv").uses
    assert {str(use.tensor): use.quantized for use in uses if use.use.op == "pointwise/conv"} == {
        "depthwise/relu6:0": True,
        f"{weight}:0": False,
        "pointwise/conv_bias_fused_bn:0": False,
    }
    reasons = {op.op: op.reason for op in summarize_model(gq.load(path)).coverage}
    assert weight in reasons["pointwise/conv"]


def save_ops(text, path):
    """Write the model with the ops in `text`, and constants for quantization, to `path`."""
    message = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 21]> g (float[1,4,4,4] x) => (float[1,4,N,N] y) {{ {text} }}'
    )
    for name, value in (("s", np.float32(0.1)), ("z", np.uint8(128))):
        message.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    for node in message.graph.node:
        node.name = f"{node.output[0]}_op"
    onnx.save(message, path)
    return path


PAIRED_POOL = """
    q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z)
    p = AveragePool<kernel_shape = [2, 2], dilations = [1, 1]>(a)
    r = QuantizeLinear(p, s, z) y = DequantizeLinear(r, s, z)
"""


def test_rejected_model(cli, tmp_path):
    """A model that ONNX Runtime cannot load has no statuses; the error and its op are reported with a remedy."""
    path = save_ops(PAIRED_POOL, tmp_path / "model.onnx")
    shown = " ".join(cli("check", path, "--for", "onnxruntime", code=1).stdout.split())
    assert "; 1 finding." in shown
    assert not re.search(r"\d+ of \d+ ops", shown)
    assert "GQ109 p_op: " in shown
    told = json.loads(cli("check", path, "--for", "onnxruntime", "--format", "json", code=1).stdout)
    assert told["ops"] == []
    assert "'dilations'" in told["findings"][0]["fix"]
    explained = " ".join(cli("explain", path, "p_op", "--for", "onnxruntime").stdout.split())
    assert "onnxruntime cannot run" in explained


def test_removed_ops(tmp_path):
    """Ops without effect have the status "removed", and not that of the op that reads them."""
    text = "t = Transpose<perm = [0, 2, 3, 1]>(x) u = Transpose<perm = [0, 3, 1, 2]>(t) y = Sin(u)"
    report = gq.check(save_ops(text, tmp_path / "model.onnx"), backend="onnxruntime")
    assert {verdict.op: verdict.status for verdict in report.verdicts} == {
        "t_op": "removed",
        "u_op": "removed",
        "y_op": "float",
    }
    assert report.counts == {"int8": 0, "fused": 0, "float": 1, "removed": 2}


@pytest.mark.usefixtures("rules_alone")
def test_result_in_memory(samples, tmp_path):
    """A result has the same verdicts in memory as in a file."""
    result = gq.insert(samples / "digits_cnn.onnx", data=str(samples / "digits_cnn_calib.npz"), samples=4)
    in_memory = gq.check(result.model, backend="onnxruntime")
    path = result.save(tmp_path / "quantized.onnx")
    assert in_memory.verdicts == gq.check(path, backend="onnxruntime").verdicts
    actual = truth.runs_as(truth.optimized(path))
    assert in_memory.counts["int8"] == sum(map(truth.is_low, actual.values())) >= 10


def test_json(cli, partly_quantized_path, samples):
    """JSON contains each op with its verdict. Several models give a list."""
    told = json.loads(cli("check", partly_quantized_path, "--for", "onnxruntime", "--format", "json", code=1).stdout)
    assert told["backend"] == "onnxruntime"
    assert sum(told["counts"].values()) == len(told["ops"])
    assert told["runs_as"] == Counter(op["runs_as"] for op in told["ops"] if op["status"] == "int8")
    assert len(told["runs_as"]) > 1
    assert all((op["broken_rule"] is None) == (op["status"] != "float") for op in told["ops"])
    both = json.loads(cli("check", samples / "digits_cnn.onnx", samples / "digits_rnn.onnx", "--format", "json").stdout)
    assert [one["findings"] for one in both] == [[], []]


def test_sarif(cli, partly_quantized_path, tmp_path):
    """The SARIF log is valid, with a rule for each code and a location for each finding."""
    out = tmp_path / "check.sarif"
    cli("check", partly_quantized_path, "--for", "onnxruntime", "--format", "sarif", "-o", out, code=1)
    log = json.loads(out.read_text("utf-8"))
    validate_sarif(log)
    run = log["runs"][0]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == list(LINT_CODES)
    assert run["results"]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].endswith("with%2C%20comma%25.onnx")


def test_github(cli, partly_quantized_path):
    """Each finding is a workflow command on one line, with its fix."""
    lines = cli(
        "check", partly_quantized_path, "--for", "onnxruntime", "--format", "github", code=1
    ).stdout.splitlines()
    assert lines
    for line in lines:
        assert line.startswith(("::warning file=", "::error file="))
        assert "with%2C comma%25.onnx,title=GQ" in line


def test_escapes():
    """Line breaks, percent signs and, in properties, colons and commas are escaped."""
    assert escape_annotation("50%\r\na:b,c") == "50%25%0D%0Aa:b,c"
    assert escape_annotation("a:b,c", property_=True) == "a%3Ab%2Cc"


def test_documentation():
    """docs/check.md documents exactly the codes, backends and rules that exist."""
    page = (ROOT / "docs" / "check.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| (GQ\d+) \| (\w+) \|", page, re.MULTILINE))
    assert rows == {code: told.level for code, told in LINT_CODES.items()}
    assert all(f"| `{name}` |" in page for name in BACKENDS)
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "graphquant" / "backends").rglob("*.py"))
    rules = set(
        re.findall(r"(?:BrokenRule\(\s*|rule=|NO_KERNEL_RULE = |REFUSED_RULE = |\brule = )\"([a-z0-9-]+)\"", sources)
    )
    listed = page.partition("## Rules that keep")[2].partition("## Findings")[0]
    assert rules == {
        name for row in re.findall(r"^\| (`.+?) \|", listed, re.MULTILINE) for name in re.findall("`([^`]+)`", row)
    }


def test_float_lstms_name_dynamic_ranges(tmp_path):
    """The reason of a float LSTM is its missing ranges of each step."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(1, 16, 8)), "r": rng.normal(size=(1, 16, 4)), "k": rng.normal(size=(4, 4))}
    body = "h = LSTM<hidden_size = 4>(x, w, r) s = Squeeze(h) y = MatMul(s, k)"
    text = f"g (float[5, 1, 8] x) => (float[5, 4] y) {{ {body} }}"
    model = load_onnx(tmp_path, text, {name: value.astype(np.float32) for name, value in weights.items()})
    x = rng.normal(size=(20, 5, 1, 8)).astype(np.float32)
    result = gq.insert(model, data={"x": x}, min_sqnr=None, rules="generic")
    verdicts = gq.check(result.model, backend="onnxruntime").verdicts
    assert [entry.broken_rule.rule for entry in verdicts if entry.type == "LSTM"] == ["dynamic-ranges"]


def test_usage_errors(cli, samples, tmp_path):
    """Unknown backends, TFLite files and existing outputs are usage errors."""
    model = samples / "digits_cnn.onnx"
    assert "onnxruntime, onnxruntime-arm, tensorrt" in cli("check", model, "--for", "ort", code=2).stderr
    (tmp_path / "out").write_text("kept")
    assert "exists already" in cli("check", model, "-o", tmp_path / "out", code=2).stderr
    assert f"no file {tmp_path / 'none.onnx'}" in cli("check", tmp_path / "none.onnx", code=3).stderr
