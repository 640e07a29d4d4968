"""The check at the end of `insert`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx.parser
import pytest
from support.cli import invoke_cli
from support.onnx_models import load_onnx
from support.rule_files import rule_text, write_rules

import graphquant as gq
from graphquant.analysis.validation import (
    SITE_SAMPLES,
    Bounds,
    Validation,
    _rejection_message,
    check_runtime_accepts,
)
from graphquant.backends import RejectedModelError
from graphquant.calibration.data import open_data
from graphquant.calibration.holdout import split_holdout
from graphquant.errors import EmptyResultError, FindingsError, UsageError
from graphquant.formats import format_module
from graphquant.formats.onnx import session
from graphquant.formats.onnx.reader import model_from_message
from graphquant.visualize.compare_report import validation_view

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

TEXT = """
<ir_version: 8, opset_import: ["" : 13]>
net (float[N, 8] x) => (float[N, 4] y)
{ y = MatMul(x, w) }
"""

RUINED = """
[scheme.two]
bits = 8
observe = { name = "fixed-point", exponent = 1 }
[[rule]]
name = "coarse"
producer = { name = "x" }
consumer = { kind = "matmul" }
quantize = "two"
"""


@pytest.fixture
def labelled_net(tmp_path: Path) -> Path:
    """A matrix product with data of 20 labelled samples."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(TEXT)
    weight = rng.normal(size=(8, 4)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, tmp_path / "net.onnx")
    x = rng.normal(size=(20, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, labels=(x @ weight).argmax(-1))
    (tmp_path / "ruined.toml").write_text(RUINED)
    return tmp_path


def insert_net(folder: Path, *options: object) -> Result:
    """Call `graphquant insert` with the net of a folder and its data."""
    return invoke_cli("insert", folder / "net.onnx", "--data", folder / "data.npz", *options)


@pytest.mark.parametrize(
    ("count", "used", "reused"), [(1, 1, True), (7, 7, True), (8, 4, False), (20, 16, False), (100, 80, False)]
)
def test_the_last_fifth_is_held_out(labelled_net: Path, count: int, used: int, reused: bool) -> None:
    """Validation uses the last fifth, at least 4 samples; with too few samples, calibration uses them as well."""
    np.savez(labelled_net / "some.npz", x=np.arange(count * 8, dtype=np.float32).reshape(count, 8))
    batches = open_data(
        str(labelled_net / "some.npz"), format_module("onnx").input_specs(gq.load(labelled_net / "net.onnx"))
    )
    calibration, holdout = split_holdout("", None, batches)
    assert (calibration.count, holdout.reuses_samples) == (used, reused)
    assert holdout.start == (max(count - 4, 0) if reused else used)


def test_metrics_are_those_of_the_holdout(labelled_net: Path) -> None:
    """SQNR, agreement and accuracy are computed on the last fifth, and equal those of NumPy."""
    result = gq.insert(labelled_net / "net.onnx", data=str(labelled_net / "data.npz"))
    x, labels = (np.load(labelled_net / "data.npz")[key][16:] for key in ("x", "labels"))
    expected, actual = (
        format_module("onnx").create_runner(model).run({"x": x})["y"] for model in (result.source, result.model)
    )
    (output,) = result.validation.comparison.outputs
    assert result.calibration_samples == 16
    assert output.sqnr == pytest.approx(10 * np.log10((expected**2).sum() / ((expected - actual) ** 2).sum()), abs=1e-3)
    assert output.agreement == (expected.argmax(-1) == actual.argmax(-1)).mean()
    assert output.accuracy == ((expected.argmax(-1) == labels).mean(), (actual.argmax(-1) == labels).mean())
    validation = result.validation
    assert (validation.quantized_macs, validation.total_macs, validation.quantized_share) == (32, 32, 1.0)
    assert result.validation.failures == ()


def test_outputs_of_models_with_many_quantized_tensors(labelled_net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit, only the outputs and the multiply-adds are measured, with the same figures."""
    results = []
    for limit in (2, 1):
        monkeypatch.setattr("graphquant.analysis.validation.MAX_MEASURED_SITES", limit)
        results.append(gq.insert(labelled_net / "net.onnx", data=f"{labelled_net / 'data.npz'}"))
    assert results[0].verdicts == results[1].verdicts != ()
    full, limited = (result.validation for result in results)
    assert full is not None
    assert limited is not None
    assert full.comparison is not None
    assert limited.comparison is not None
    assert (len(full.comparison.sites), len(limited.comparison.sites)) == (2, 0)
    for expected, actual in zip(full.comparison.outputs, limited.comparison.outputs, strict=True):
        # Only a model with few of them joins samples, whose outputs differ by rounding.
        assert (actual.name, actual.rows, actual.values) == (expected.name, expected.rows, expected.values)
        assert actual.sqnr == pytest.approx(expected.sqnr, abs=0.01)
    assert limited.quantized_macs == full.quantized_macs > 0


def test_ruined_models_fail_validation(labelled_net: Path) -> None:
    """Below 20 dB the output and the tensor are named, the model is written, and --strict ends with 1."""
    options = ("--rules", labelled_net / "ruined.toml", "--force")
    plain = insert_net(
        labelled_net, *options, "-o", labelled_net / "out.onnx", "--report", labelled_net / "report.json"
    )
    assert plain.exit_code == 0
    assert "warning: " in plain.stdout
    assert "\x1b" not in plain.stdout
    report = json.loads((labelled_net / "report.json").read_text())["validation"]
    assert report["met"] is False
    assert report["comparison"]["sqnr"] < 20
    assert report["multiply_adds"] == {"quantized": 0, "total": 32}
    strict = insert_net(labelled_net, *options, "-o", labelled_net / "strict.onnx", "--strict")
    assert strict.exit_code == 1
    assert strict.stderr.startswith("error: ")
    assert (labelled_net / "strict.onnx").read_bytes() == (labelled_net / "out.onnx").read_bytes()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--min-sqnr", "20"),
        ("--min-agreement", "1"),
        ("--min-agreement", "99.9%"),
        ("--max-accuracy-drop", "0"),
    ],
)
def test_bounds(labelled_net: Path, option: str, value: str) -> None:
    """A bound that is met gives exit code 0; with a statistics file there is a search too."""
    options = ("--dry-run", "--allow-empty")
    assert insert_net(labelled_net, *options, option, value).exit_code == 0
    gq.calibrate(labelled_net / "net.onnx", data=str(labelled_net / "data.npz")).save(labelled_net / "stats.gqs")
    result = insert_net(labelled_net, *options, "--stats", labelled_net / "stats.gqs", "--min-sqnr", "60")
    assert result.exit_code == 0


def test_unreachable_bounds_write_nothing(labelled_net: Path) -> None:
    """A bound that no quantized plan meets ends with 1, names the SQNR that was reached, and writes nothing."""
    options = ("--min-sqnr", "150", "-o", labelled_net / "out.onnx")
    result = insert_net(labelled_net, *options)
    assert result.exit_code == 1
    assert re.search(r"'y' has \d\d\.\d\d dB.* 150 dB", result.stderr)
    assert not (labelled_net / "out.onnx").exists()
    with pytest.raises(EmptyResultError):
        gq.insert(labelled_net / "net.onnx", data=str(labelled_net / "data.npz"), min_sqnr=150)
    assert insert_net(labelled_net, *options, "--allow-empty").exit_code == 0
    assert gq.load(labelled_net / "out.onnx").digest == gq.load(labelled_net / "net.onnx").digest


def test_nothing_inserted_is_an_error(labelled_net: Path) -> None:
    """A result without quantized tensors ends with 1 and its reasons, and writes nothing, unless it is allowed."""
    options = ("--exclude", "x", "--exclude", "w", "-o", labelled_net / "out.onnx")
    result = insert_net(labelled_net, *options, "--report", labelled_net / "report.json")
    assert result.exit_code == 1
    assert "--exclude 'x'" in result.stderr
    assert not (labelled_net / "out.onnx").exists()
    assert not (labelled_net / "report.json").exists()
    assert insert_net(labelled_net, *options, "--allow-empty").exit_code == 0
    ruined = ("--rules", labelled_net / "ruined.toml")
    assert invoke_cli("insert", labelled_net / "net.onnx", *ruined, "-o", labelled_net / "two.onnx").exit_code == 0


@pytest.mark.parametrize("steps", [1, 6])
def test_steps_of_time_count_as_they_are_fed(tmp_path: Path, steps: int) -> None:
    """A first axis of unknown size counts steps of time where a sample has several of them."""
    weight = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    source = load_onnx(tmp_path, "g (float[k, 4] x) => (float[k, 4] y) { y = MatMul(x, w) }", {"w": weight})
    data = {"x": np.random.default_rng(1).normal(size=(8, steps, 4)).astype(np.float32)}
    validation = gq.insert(source, data=data, min_sqnr="none").validation
    assert validation is not None
    assert validation.total_macs == steps * 16


@pytest.mark.parametrize(("size", "agreement"), [("k", None), ("6", 1.0)])
def test_series_have_no_class(tmp_path: Path, size: str, agreement: float | None) -> None:
    """The largest value of an output whose only axis has an unknown size is no class."""
    weight = np.random.default_rng(0).normal(size=(4, 1)).astype(np.float32)
    body = f"(float[{size}, 4] x) => (float[{size}] y) {{ z = MatMul(x, w) y = Squeeze(z, axes) }}"
    source = load_onnx(tmp_path, f"g {body}", {"w": weight, "axes": np.array([1])})
    data = {"x": np.random.default_rng(1).normal(size=(8, 6, 4)).astype(np.float32)}
    validation = gq.insert(source, data=data, min_sqnr="none").validation
    assert validation is not None
    assert [output.agreement for output in validation.comparison.outputs] == [agreement]


def test_share_of_quantized_macs_is_a_bound(labelled_net: Path) -> None:
    """--min-quantized is met by the share of multiply-adds whose inputs are all quantized, also without data."""
    call = ("insert", labelled_net / "net.onnx", "--dry-run", "--min-quantized")
    assert invoke_cli(*call, "100%", "--data", labelled_net / "data.npz").exit_code == 0
    result = invoke_cli(*call, "0.5", "--rules", "weight_only")
    assert result.exit_code == 1
    assert "0.00%" in result.stderr
    assert invoke_cli(*call, "0", "--rules", "weight_only").exit_code == 0
    assert gq.insert(labelled_net / "net.onnx", data=str(labelled_net / "data.npz")).quantized_share == 1.0


@pytest.mark.parametrize(("option", "bound"), [("max_accuracy_drop", 0.01), ("min_agreement", 0.99)])
def test_bounds_of_classes(labelled_net: Path, option: str, bound: float) -> None:
    """The accuracy of the labels and the agreement are compared with their bounds."""
    validation = gq.insert(
        labelled_net / "net.onnx", rules=labelled_net / "ruined.toml", data=str(labelled_net / "data.npz")
    ).validation
    assert len(replace(validation, bounds=Bounds(**{option: bound})).failures) == 1
    flag = f"--{option.replace('_', '-')}"
    options = ("--rules", labelled_net / "ruined.toml", "--dry-run", flag)
    report = labelled_net / "report.json"
    assert insert_net(labelled_net, *options, bound, "--allow-empty", "--report", report).exit_code == 0
    assert json.loads(report.read_text())["search"]["float_tensors"]
    np.savez(labelled_net / "data.npz", x=np.load(labelled_net / "data.npz")["x"])
    without = insert_net(labelled_net, *options, bound)
    assert (without.exit_code == 2 and "'labels'" in without.stderr) == (option == "max_accuracy_drop")


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (np.zeros(19, np.int64), "19"),
        (np.zeros(20, np.float32), "float32"),
        (np.array(["a"] * 20), "<U1"),
    ],
)
def test_invalid_labels_are_rejected_early(labelled_net: Path, labels: Any, said: str) -> None:
    """Invalid labels are reported before anything runs, with their expected form."""
    np.savez(labelled_net / "data.npz", x=np.load(labelled_net / "data.npz")["x"], labels=labels)
    result = insert_net(labelled_net, "--dry-run", "--max-accuracy-drop", "1")
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Labels are integers" in result.stderr


@pytest.mark.parametrize("first", [-1, 50])
def test_labels_outside_the_classes_give_no_accuracy(labelled_net: Path, first: int) -> None:
    """Labels outside the classes of the output give no accuracy instead of 0, which could not drop."""
    np.savez(labelled_net / "data.npz", x=np.load(labelled_net / "data.npz")["x"], labels=np.arange(first, first + 20))
    check = gq.insert(labelled_net / "net.onnx", data=str(labelled_net / "data.npz")).validation
    assert check.comparison.outputs[0].accuracy is None
    with pytest.raises(UsageError, match="'labels'"):
        gq.insert(labelled_net / "net.onnx", data=str(labelled_net / "data.npz"), max_accuracy_drop=1.0)


def test_one_hot_labels_are_rejected(labelled_net: Path) -> None:
    """They fit no output, which ends the command before a search."""
    np.savez(labelled_net / "data.npz", x=np.load(labelled_net / "data.npz")["x"], labels=np.eye(20, dtype=np.int64))
    result = insert_net(labelled_net, "--dry-run", "--max-accuracy-drop", "1")
    assert result.exit_code == 2
    assert "'labels'" in result.stderr


@pytest.mark.parametrize("option", ["--min-sqnr", "--min-agreement", "--max-accuracy-drop"])
def test_bounds_that_are_not_finite_are_rejected(labelled_net: Path, option: str) -> None:
    """NaN, which everything would meet or miss, is refused by the command and by the function."""
    result = insert_net(labelled_net, option, "nan")
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.stderr
    with pytest.raises(UsageError, match=option[2:].replace("-", "_")):
        gq.insert(
            labelled_net / "net.onnx",
            data=str(labelled_net / "data.npz"),
            **{option[2:].replace("-", "_"): float("nan")},
        )


def test_statistics_and_data(labelled_net: Path) -> None:
    """With statistics, the data is for validation: all of it, or the last fifth of the data of the statistics."""
    stats = gq.calibrate(labelled_net / "net.onnx", data=str(labelled_net / "data.npz"))
    same = gq.insert(labelled_net / "net.onnx", stats=stats, data=str(labelled_net / "data.npz")).validation
    assert (same.reuses_samples, same.comparison.samples) == (True, 4)
    random_validation = gq.insert(labelled_net / "net.onnx", stats=stats, data="random:6").validation
    assert (
        random_validation.reuses_samples,
        random_validation.comparison.samples,
        random_validation.comparison.random,
    ) == (False, 6, True)
    assert (random_validation.calibrated_on_other_data, same.calibrated_on_other_data) == (True, False)
    texts = {str(validation_view(each)[0]).partition(":")[0] for each in (random_validation, same)}
    assert len(texts) == 2
    calibrated = gq.insert(labelled_net / "net.onnx", data=str(labelled_net / "data.npz"))
    again = gq.insert(labelled_net / "net.onnx", stats=calibrated.stats, data=str(labelled_net / "data.npz")).validation
    assert (again.reuses_samples, again.comparison.samples) == (False, 4)
    assert gq.insert(labelled_net / "net.onnx", stats=stats).validation is None


def test_no_validate(labelled_net: Path) -> None:
    """Without validation, calibration uses all samples, and the report has no validation."""
    assert (
        gq.insert(labelled_net / "net.onnx", data=str(labelled_net / "data.npz"), validate=False).calibration_samples
        == 20
    )
    report = labelled_net / "report.json"
    insert_net(labelled_net, "--no-validate", "--dry-run", "--report", report)
    assert json.loads(report.read_text())["validation"] is None


def test_models_that_cannot_run_fail_validation(labelled_net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that its framework refuses is written all the same, and misses every bound."""
    from graphquant.errors import ModelError
    from graphquant.formats.onnx.runner import OnnxRunner

    def refuse(*_: Any) -> None:
        raise ModelError("It is refused. Mend it.")

    monkeypatch.setattr(OnnxRunner, "start", refuse)
    plain = ("--no-algorithm", "bias-correction")  # the algorithm runs the model too
    result = insert_net(labelled_net, "-o", labelled_net / "out.onnx", "--strict", *plain)
    assert result.exit_code == 1
    assert "It is refused. Mend it." in result.stdout
    assert (labelled_net / "out.onnx").is_file()


@pytest.fixture
def rejecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make onnxruntime reject each model with a DequantizeLinear."""
    from graphquant.formats.onnx import session

    create = session.onnxruntime.InferenceSession

    def reject(data: bytes, *arguments: Any, **options: Any) -> Any:
        nodes = onnx.ModelProto.FromString(data).graph.node
        for node in nodes:
            if node.op_type == "DequantizeLinear":
                raise RuntimeError(f"[ONNXRuntimeError] : 1 : FAIL : no kernel for {node.name}")
        return create(data, *arguments, **options)

    monkeypatch.setattr(session.onnxruntime, "InferenceSession", reject)


@pytest.mark.parametrize("options", [(), ("--data", "data.npz"), ("--data", "data.npz", "--no-validate")])
@pytest.mark.usefixtures("rejecting")
def test_rejected_results_are_not_written(labelled_net: Path, options: tuple[str, ...]) -> None:
    """If onnxruntime loads the float model only, the exit code is 1, and an earlier output stays."""
    (labelled_net / "out.onnx").write_bytes(b"earlier")
    arguments = [labelled_net / option if option.endswith("npz") else option for option in options]
    result = invoke_cli(
        "insert",
        labelled_net / "net.onnx",
        *arguments,
        "--rules",
        "weight_only",
        "-o",
        labelled_net / "out.onnx",
        "--force",
    )
    assert result.exit_code == 1
    assert "w/quant/dequant (DequantizeLinear)" in result.stderr
    assert "--exclude w " in result.stderr
    assert (labelled_net / "out.onnx").read_bytes() == b"earlier"


@pytest.mark.parametrize("written", ["w/quant/dequant", "w/quant/dequant/cast"])
def test_rejection_of_an_op_written_for_another(labelled_net: Path, written: str) -> None:
    """The advice names the tensor of an op, also where the file has several ops for it."""
    quantized = gq.insert(labelled_net / "net.onnx", rules="weight_only").model
    assert "--exclude w " in _rejection_message(quantized, RejectedModelError("no kernel", "", ("", written)))


def test_models_with_unknown_ops_are_not_judged(labelled_net: Path) -> None:
    """If onnxruntime does not load the float model either, there is a note, and with data a failed validation."""
    text = (
        '<ir_version: 8, opset_import: ["": 13, "own": 1]> g (float[4, 8] x) => (y) { m = MatMul(x, w) y = own.Op(m) }'
    )
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(8, dtype=np.float32), "w"))
    onnx.save(model, labelled_net / "own.onnx")
    result = gq.insert(labelled_net / "own.onnx", rules="weight_only")
    assert result.inserted
    assert "own" in result.unjudged_reason
    assert not gq.insert(labelled_net / "net.onnx", rules="weight_only").unjudged_reason
    assert not result.failures
    measured = gq.insert(labelled_net / "own.onnx", data={"x": np.ones((4, 8), np.float32)}, rules="weight_only")
    assert measured.inserted
    assert len(measured.failures) == 1


@pytest.mark.parametrize(("smallest", "exit_code"), [(1e-6, 1), (0.0, 0)])
def test_infinite_outputs(labelled_net: Path, smallest: float, exit_code: int) -> None:
    """A result is not written if an output is infinite where that of the float model is finite, but else it is."""
    text = TEXT.replace("y = MatMul(x, w)", "one = Constant <value_float = 1.0> () y = Div(one, x)").replace(
        "N, 4", "N, 8"
    )
    onnx.save(onnx.parser.parse_model(text), labelled_net / "root.onnx")
    x = np.linspace(0.5, 1, 160, dtype=np.float32).reshape(20, 8)
    x[:, 0] = smallest
    np.savez(labelled_net / "root.npz", x=x)
    rules = RUINED.replace("matmul", "div").replace('{ name = "fixed-point", exponent = 1 }', '"minmax"')
    (labelled_net / "root.toml").write_text(rules)
    options = (
        "--data",
        labelled_net / "root.npz",
        "--rules",
        labelled_net / "root.toml",
        "-o",
        labelled_net / "out.onnx",
    )
    result = invoke_cli("insert", labelled_net / "root.onnx", *options)
    assert (result.exit_code, (labelled_net / "out.onnx").exists()) == (exit_code, not exit_code)
    batch_options = (
        "--data",
        labelled_net / "root.npz",
        "--rules",
        labelled_net / "root.toml",
        "-o",
        labelled_net / "batch.onnx",
    )
    assert invoke_cli("batch", labelled_net / "root.onnx", *batch_options).exit_code == exit_code
    assert (labelled_net / "batch.onnx").exists() == (not exit_code)


def test_a_model_of_texts_needs_no_data(tmp_path: Path) -> None:
    """Data is not opened if there is nothing to quantize, so data that does not fit is no error."""
    text = '<ir_version: 8, opset_import: ["": 13]> g (string[2] x) => (string[N] y) { y = StringNormalizer (x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "texts.onnx")
    assert gq.insert(tmp_path / "texts.onnx", data="random:4", allow_empty=True).inserted == ()


@pytest.mark.parametrize(("dtype", "is_changed"), [("float8_e4m3fn", True), ("int2", False)])
def test_optimizations_that_change_the_result(tmp_path: Path, dtype: str, is_changed: bool) -> None:
    """A bad result is measured without the optimizations of onnxruntime, which removes a Relu before float8."""
    text = TEXT.replace("13]", "19]").replace("y = MatMul(x, w)", "a = MatMul(x, v) r = Relu(a) y = MatMul(r, w)")
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    for name, shape in (("v", (8, 8)), ("w", (8, 4))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    onnx.save(model, tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(20, 8)).astype(np.float32))
    scheme = f'[scheme.low]\ndtype = "{dtype}"\nobserve = "minmax"\n'
    rules = write_rules(tmp_path, scheme + rule_text(producer='{ kind = "relu" }', quantize="low"))
    validation = gq.insert(tmp_path / "net.onnx", data=str(tmp_path / "data.npz"), rules=rules).validation
    (output,) = validation.comparison.outputs
    assert output.sqnr < 10
    assert len(validation.failures) == 1
    assert (list(validation.unoptimized_sqnr), len(validation.warnings)) == (["y"] * is_changed, is_changed)
    assert all(sqnr > output.sqnr + 10 for sqnr in validation.unoptimized_sqnr.values())
    result = gq.insert(tmp_path / "net.onnx", data=str(tmp_path / "data.npz"), rules=rules, min_sqnr=-20)
    validation = result.validation
    assert (validation.failures, len(validation.warnings)) == ((), is_changed)


def test_good_results_are_measured_once(labelled_net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that meets the bound is not measured without optimizations, which takes time."""
    levels = []
    create_session = session.create_session
    monkeypatch.setattr(
        session,
        "create_session",
        lambda *args, **kw: levels.append(kw["mode"].optimizes) or create_session(*args, **kw),
    )
    for rules, level in (("weight_only", [True]), (str(labelled_net / "ruined.toml"), [False, True])):
        levels.clear()
        gq.insert(labelled_net / "net.onnx", data=str(labelled_net / "data.npz"), rules=[rules])
        assert sorted(set(levels)) == level


def test_the_float_model_is_opened_once_for_its_outputs(labelled_net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples after those whose tensors are measured run in the session that the first of them opened."""
    sessions: list[int] = []
    create_session = session.create_session

    def count_plain_session(data: bytes, *args: Any, **options: Any) -> Any:
        is_plain = not (options["mode"].watched or options["mode"].timed or options["mode"].optimized)
        has_pairs = any(node.op_type == "DequantizeLinear" for node in onnx.ModelProto.FromString(data).graph.node)
        sessions.append(is_plain and not has_pairs)
        return create_session(data, *args, **options)

    monkeypatch.setattr(session, "create_session", count_plain_session)
    data = {"x": np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)}
    result = gq.insert(labelled_net / "net.onnx", data=data)
    assert result.validation is not None
    assert result.validation.comparison is not None
    assert result.validation.comparison.samples > SITE_SAMPLES
    assert sum(sessions) == 1


def test_tensors_that_are_clipped_on_purpose_are_not_the_worst(tmp_path: Path) -> None:
    """The error of values that a hard swish turns to 0 anyway is in the table, but is not shown as a problem."""
    text = (
        '<ir_version: 10, opset_import: ["" : 17]> g (float[1,8,12,12] x) => (float[1,8,12,12] y)'
        " { c = Conv(x, w) h = HardSwish(c) y = Conv(h, w) }"
    )
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(8, 8, 1, 1)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    data = {"x": 8 * rng.normal(size=(20, 8, 12, 12)).astype(np.float32)}
    result = gq.insert(model, data=data, rules=["costs = 'none'\n", "onnxruntime"], min_sqnr="none")
    assert result.validation is not None
    assert result.validation.comparison is not None
    assert {str(tensor) for tensor in result.saturated_tensors} == {"c:0"}
    assert "c:0" in {site.tensor for site in result.validation.comparison.sites}
    assert "c:0" not in {site.tensor for site in result.validation.worst_sites}


@pytest.mark.parametrize(
    ("problem", "excluded"),
    [
        ("Could not find an implementation for DequantizeLinear(28) node with name 'conv2_bias_dq'.", "conv2"),
        ("Non-zero status code returned while running Conv node. Name:'conv' Status Message: sizes differ", "conv"),
        ("Non-zero status code returned while running Conv node. Name:'added' Status Message: sizes differ", "OP"),
        ("Non-zero status code returned while running Add node. Name:'convolved_7' Status Message: sizes", "OP"),
        ("It has no kernel.", "OP"),
    ],
)
def test_the_op_that_fails_is_excluded_by_its_name_in_the_model(problem: str, excluded: str) -> None:
    """ONNX Runtime names ops that it inserts after those of the model."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[1, 2, 4, 4] x, float[2, 2, 1, 1] w) => (float[1, 2, 4, 4] y) {
        [conv] z = Conv (x, w) [conv2] y = Conv (z, w)
    }"""
    source = model_from_message(onnx.parser.parse_model(text))
    failed = Validation(comparison=None, problem=problem, reuses_samples=False, bounds=Bounds())
    with pytest.raises(FindingsError, match=f"--exclude {excluded}\\."):
        check_runtime_accepts(source, source, failed, other_backend=False)
