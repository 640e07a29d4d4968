"""`graphquant check`: output and exit codes."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

import graphquant as gq
from graphquant.backends import BACKENDS, LINT_CODES
from graphquant.visualize.check_report import escape_annotation

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def quantized(samples, tmp_path):
    """Write a model whose residual sum and final sum are not quantized."""
    data = str(samples / "digits_cnn_calib.npz")
    result = gq.insert(samples / "digits_cnn.onnx", data=data, samples=4, exclude=["/residual|stem|logits.bias/"])
    return result.save(tmp_path / "with, comma%.onnx")


def test_text(cli, quantized):
    """The table names each float op, the reason and the fix. Findings give exit code 1."""
    shown = cli("check", quantized, "--for", "onnxruntime", code=1).stdout
    assert "ops run in low precision" in shown.splitlines()[0]
    assert "QLinearConv" in shown
    assert "float-input" in shown or "between" in shown
    assert "GQ102" in shown


def test_float_model(cli, samples):
    """A model without quantization has no findings."""
    shown = cli("check", samples / "digits_cnn.onnx", "--for", "onnxruntime").stdout
    assert "`graphquant insert`" in shown
    assert "0 findings" in shown


def test_json(cli, quantized, samples):
    """JSON contains each op with its verdict. Several models give a list."""
    told = json.loads(cli("check", quantized, "--for", "onnxruntime", "--format", "json", code=1).stdout)
    assert told["backend"] == "onnxruntime"
    assert sum(told["counts"].values()) == len(told["ops"])
    assert told["runs_as"]["QLinearConv"] == sum(
        op["runs_as"] == "QLinearConv" for op in told["ops"] if op["status"] == "int8"
    )
    assert all((op["broken_rule"] is None) == (op["status"] != "float") for op in told["ops"])
    both = json.loads(cli("check", samples / "digits_cnn.onnx", samples / "digits_rnn.onnx", "--format", "json").stdout)
    assert [one["findings"] for one in both] == [[], []]


def test_sarif(cli, quantized, tmp_path, published):
    """The SARIF log is valid, with a rule for each code and a location for each finding."""
    out = tmp_path / "check.sarif"
    cli("check", quantized, "--for", "onnxruntime", "--format", "sarif", "-o", out, code=1)
    log = json.loads(out.read_text("utf-8"))
    schema = published("https://json.schemastore.org/sarif-2.1.0.json")
    jsonschema.validate(log, schema, format_checker=jsonschema.FormatChecker())
    run = log["runs"][0]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == list(LINT_CODES)
    assert run["results"]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].endswith("with%2C%20comma%25.onnx")


def test_github(cli, quantized):
    """Each finding is a workflow command on one line, with its fix."""
    lines = cli("check", quantized, "--for", "onnxruntime", "--format", "github", code=1).stdout.splitlines()
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


def test_usage_errors(cli, samples, tmp_path):
    """Unknown backends, TFLite files and existing outputs are usage errors."""
    model = samples / "digits_cnn.onnx"
    assert "onnxruntime, onnxruntime-arm, tensorrt" in cli("check", model, "--for", "ort", code=2).stderr
    (tmp_path / "out").write_text("kept")
    assert "exists already" in cli("check", model, "-o", tmp_path / "out", code=2).stderr
    assert "There is no file" in cli("check", tmp_path / "none.onnx", code=3).stderr
