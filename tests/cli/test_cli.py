"""The command line: each verb, its forms, exit codes and outputs."""

from __future__ import annotations

import errno
import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
from contextvars import Context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from onnx import helper, numpy_helper, parser

import graphquant as gq
from graphquant.api import models
from graphquant.cli import main
from graphquant.errors import (
    DataError,
    FindingsError,
    GraphQuantError,
    MissingDependencyError,
    ModelError,
    NeedsDataError,
    RuleError,
    UsageError,
)
from graphquant.utils.atomic_files import lock_output

if TYPE_CHECKING:
    from collections.abc import Callable

ENVIRONMENT = {**os.environ, "COLUMNS": "80", "TERM": "xterm-256color"}


def program(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs graphquant as a user does."""
    command = [sys.executable, "-m", "graphquant", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT, **options)


def on_terminal(*arguments: object) -> tuple[str, str]:
    """Run graphquant with stdout and stderr as terminals of 80 columns, and return both outputs."""
    out, err = pty.openpty(), pty.openpty()
    command = [sys.executable, "-m", "graphquant", *map(str, arguments)]
    with subprocess.Popen(command, stdout=out[1], stderr=err[1], stdin=subprocess.DEVNULL, env=ENVIRONMENT) as process:
        os.close(out[1])
        os.close(err[1])
        texts = [_drained(stream[0]) for stream in (out, err)]
        assert process.wait() == 0, texts
    return texts[0], texts[1]


def _drained(descriptor: int) -> str:
    data = b""
    try:
        while chunk := os.read(descriptor, 1 << 16):
            data += chunk
    except OSError:  # how Linux tells the end of a terminal
        pass
    os.close(descriptor)
    return data.decode()


@pytest.fixture
def cnn_folder(samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own folder with the CNN and its data in it, the current one."""
    for name in ("digits_cnn.onnx", "digits_cnn.pb", "digits_cnn_calib.npz"):
        shutil.copy(samples / name, tmp_path / name)
    shutil.copytree(samples / "digits_cnn_saved_model", tmp_path / "digits_cnn_saved_model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- insert ----------------------------------------------------------------------------------------


def test_help_describes_each_command_on_one_line() -> None:
    """The description of each command fits into 80 columns."""
    output = program("--help").stdout
    assert {line.split()[0] for line in output.split("Commands:")[1].splitlines() if line} == set(main.commands)
    assert "..." not in output.split("Commands:")[1]


def test_insert_names_its_output_after_the_model(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """The default output is next to the model with .quant in its name, and stdout ends with it."""
    for name, output_name in (
        ("digits_cnn.onnx", "digits_cnn.quant.onnx"),
        ("digits_cnn.pb", "digits_cnn.quant.pb"),
        ("digits_cnn_saved_model", "digits_cnn_saved_model.quant"),
    ):
        result = cli("insert", name, "--rules", "weight_only")
        assert result.stdout.rstrip().endswith(f"Written to {output_name}")
        assert result.stderr == ""
        assert gq.load(cnn_folder / output_name).format == gq.load(cnn_folder / name).format


def test_insert_replaces_outputs_only_with_force(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """An existing output is an error with exit code 2 and is not changed; --force replaces it."""
    Path("out.onnx").write_text("precious")
    result = cli("insert", "digits_cnn.onnx", "-o", "out.onnx", "--rules", "weight_only", code=2)
    assert result.stderr.startswith("error: out.onnx ")
    assert result.stdout == ""
    assert Path("out.onnx").read_text() == "precious"
    cli("insert", "digits_cnn.onnx", "-o", "out.onnx", "--rules", "weight_only", "--force")
    assert len(gq.load("out.onnx").main) == len(gq.load("digits_cnn.onnx").main) + 27


def test_dry_run_writes_nothing(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """--dry-run prints the same and writes no file except the report."""
    before = sorted(cnn_folder.iterdir())
    result = cli("insert", "digits_cnn.onnx", "--rules", "weight_only", "--dry-run")
    assert "Nothing was written (dry run)." in result.stdout
    assert sorted(cnn_folder.iterdir()) == before
    cli("insert", "digits_cnn.onnx", "--rules", "weight_only", "--dry-run", "--report", "report.json")
    report = json.loads(Path("report.json").read_text())
    assert (report["output"], len(report["sites"])) == (None, 9)
    assert sorted(cnn_folder.iterdir()) == sorted([*before, cnn_folder / "report.json"])


@pytest.mark.parametrize("options", [[], ["--float-weights"]])
def test_report_equals_inspect(cli: Callable[..., Any], cnn_folder: Path, options: list[str]) -> None:
    """Each site of the report is in the written model with the same scale, zero point, type and axis."""
    arguments = ["--data", "digits_cnn_calib.npz", "-o", "out.onnx", "--report", "report.json", *options]
    cli("insert", "digits_cnn.onnx", *arguments)
    inspected = cli("inspect", "out.onnx", "--format=json").stdout
    compare_report(json.loads(Path("report.json").read_text()), json.loads(inspected))


@pytest.mark.parametrize("name", ["digits_cnn.pb", "digits_cnn_saved_model", "digits_rnn.pb", "digits_rnn.onnx"])
def test_report_equals_inspect_without_data(cli: Callable[..., Any], samples: Path, tmp_path: Path, name: str) -> None:
    """The same for TensorFlow models and for bodies, with fixed-point ranges."""
    out, report = tmp_path / f"out{Path(name).suffix}", tmp_path / "report.json"
    cli("insert", samples / name, "--rules", "fixed_point", "-o", out, "--report", report)
    compare_report(json.loads(report.read_text()), json.loads(cli("inspect", out, "--format", "json").stdout))


def compare_report(report: dict[str, Any], inspected: dict[str, Any]) -> None:
    """Assert that `inspect` finds the parameters of every site in a report."""
    keys = ("dtype", "scale", "zero_point", "axis")
    reported = {
        (output["graph"], output["op"]): [site[key] for key in keys]
        for site in report["sites"]
        for output in site["outputs"]
    }
    read = {(entry["graph"], entry["op"]): [entry[key] for key in keys] for entry in inspected["quantization"]}
    assert len(reported) == sum(len(site["outputs"]) for site in report["sites"]) >= len(report["sites"]) > 0
    assert reported == read
    assert all(np.all(np.asarray(scale) > 0) for _, scale, _, _ in reported.values())


def test_needs_data_gives_lines_to_paste(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """Without data the exit code is 2, and the three lines really run, with a blank in the path too."""
    Path("digits_cnn.onnx").rename("my digits.onnx")
    Path("digits_cnn_calib.npz").rename("calibration.npz")
    result = cli("insert", "my digits.onnx", code=2)
    assert result.stdout == ""
    lines = [line.strip() for line in result.stderr.splitlines() if line.startswith("  ")]
    assert [shlex.split(line)[3:] for line in lines] == [
        ["--data", "calibration.npz"],
        ["--rules", "fixed_point"],
        ["--rules", "weight_only"],
    ]
    for line, rules in zip(lines, ("onnxruntime", "fixed_point", "weight_only"), strict=True):
        words = shlex.split(line)
        assert words[0] == "graphquant"
        sites = len(gq.plan("my digits.onnx", rules=[rules]).sites)
        assert f"{sites} tensors quantized" in cli(*words[1:], "--force").stdout


def test_samples_limits_the_data(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """--samples takes the first ones only, and there is no zero of them."""
    result = cli("insert", "digits_cnn.onnx", "--data", "digits_cnn_calib.npz", "--samples", 7, "--dry-run")
    assert "ranges from 7 samples" in result.stdout
    cli("insert", "digits_cnn.onnx", "--data", "digits_cnn_calib.npz", "--samples", 0, code=2)


def test_random_data_is_marked(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """Made-up data is announced in the table and in the report."""
    result = cli("insert", "digits_cnn.onnx", "--data", "random:4", "--report", "report.json")
    assert "RANDOM data" in result.stdout
    data = json.loads(Path("report.json").read_text())["data"]
    assert (data["samples"], data["random"], data["complete"], data["stats"]) == (4, True, True, None)


# -- plans -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("rules_alone")
def test_edited_plan_is_applied_exactly(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """A range and a scale in an edited plan are used, and a removed site is not inserted."""
    cli("plan", "digits_cnn.onnx", "--format", "json", "-o", "plan.json")
    plan = json.loads(Path("plan.json").read_text())
    named = {site["tensor"]["op"]: site for site in plan["sites"]}
    named["stem/relu"]["range"] = [0.0, 5.1]
    named["residual_2/conv"] |= {"scale": [0.25], "zero_point": [100]}
    plan["sites"].remove(named["residual/relu"])
    Path("plan.json").write_text(json.dumps(plan))
    options = ["--data", "digits_cnn_calib.npz", "--report", "report.json"]
    cli("insert", "digits_cnn.onnx", "--plan", "plan.json", *options)
    report = json.loads(Path("report.json").read_text())
    sites = {site["tensor"]["op"]: site for site in report["sites"]}
    # The biases of the two convolutions that read the removed site have no scale.
    biases = [skip["tensor"]["op"] for skip in report["skips"] if skip["code"] == "bias"]
    assert len(biases) == 2
    assert list(sites) == [site["tensor"]["op"] for site in plan["sites"] if site["tensor"]["op"] not in biases]
    assert sites["stem/relu"]["scale"] == pytest.approx(5.1 / 255, rel=1e-6)
    assert (sites["residual_2/conv"]["scale"], sites["residual_2/conv"]["zero_point"]) == (0.25, 100)
    cli("insert", "digits_cnn.onnx", *options, "-o", "all.onnx")
    for site in json.loads(Path("report.json").read_text())["sites"]:
        name = site["tensor"]["op"]
        # The scale of an int32 bias follows that of the input.
        if name not in {"stem/relu", "residual_2/conv", "residual/relu"} and site["dtype"] != "int32":
            assert sites[name]["scale"] == pytest.approx(site["scale"], rel=1e-6)  # watching others, others fuse


def test_unedited_plan_gives_the_same_model(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """Rules, and the plan that they create, give the same bytes."""
    data = ["--data", "digits_cnn_calib.npz"]
    cli("plan", "digits_cnn.onnx", "--format", "json", "-o", "plan.json")
    cli("insert", "digits_cnn.onnx", *data, "-o", "rules.onnx")
    cli("insert", "digits_cnn.onnx", *data, "-o", "plan.onnx", "--plan", "plan.json")
    assert Path("plan.onnx").read_bytes() == Path("rules.onnx").read_bytes()


def test_plan_and_rules_do_not_go_together(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """--plan with an option that makes a plan is a usage error, and so is another model's plan."""
    cli("plan", "digits_cnn.onnx", "--format", "json", "-o", "plan.json")
    result = cli("insert", "digits_cnn.onnx", "--plan", "plan.json", "--rules", "fixed_point", code=2)
    assert result.stderr.startswith("error: --plan ")
    result = cli("insert", "digits_cnn.pb", "--plan", "plan.json", code=2)
    assert "another model" in result.stderr
    result = cli("insert", "digits_cnn.onnx", "--plan", "missing.json", code=2)
    assert "missing.json cannot be read" in result.stderr


def test_include_and_exclude_choose(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """--include quantizes only its matches, --exclude skips its matches with the reason, and both accept regexes."""

    def planned(*options: str) -> list[str]:
        data = json.loads(cli("plan", "digits_cnn.onnx", "--rules", "weight_only", "--format=json", *options).stdout)
        return [site["uses"][0]["op"] for site in data["sites"]]

    everything = planned()
    assert planned("--include", "residual_*") == ["residual_2/conv", "residual_1/conv"]
    assert planned("--include", "/residual_[1]/") == ["residual_1/conv"]
    assert planned("--exclude", "residual_*") == [name for name in everything if not name.startswith("residual_")]
    assert planned("--include", "residual_*", "--exclude", "*_1/*") == ["residual_2/conv"]
    text = cli("plan", "digits_cnn.onnx", "--rules", "weight_only", "--exclude", "residual_*").stdout
    assert "--exclude 'residual_*'" in text


def test_rules_stack_and_the_first_match_wins(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """Rules of an earlier file take precedence over those of a later one."""
    Path("mine.toml").write_text(
        '[[rule]]\nname = "keep"\nwhy = "it is small"\n'
        'consumer = { name = "stem/conv", input = "input|weight" }\nquantize = "float"\n'
    )

    def planned(*names: str) -> Any:
        options = [f"--rules={name}" for name in names]
        return json.loads(cli("plan", "digits_cnn.onnx", "--format=json", *options).stdout)

    single_plan, stacked_plan = planned("fixed_point"), planned("mine.toml", "fixed_point")
    late = planned("fixed_point", "mine.toml")
    assert stacked_plan["rules"] == ["mine.toml", "fixed_point"]
    assert [site for site in single_plan["sites"] if site["uses"][0]["op"] != "stem/conv"] == stacked_plan["sites"]
    assert {skip["reason"] for skip in stacked_plan["skips"]} == {"it is small"}
    assert (late["sites"], late["unused"]) == (single_plan["sites"], ["keep"])


def test_rules_without_a_match(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """A rule of the user without a match is named, by insert as well; shipped rules are counted by plan."""
    Path("mine.toml").write_text(
        '[[rule]]\nname = "mistaken"\nwhy = "x"\nconsumer = { kind = "lstm" }\nquantize = "float"\n'
    )
    ours = ("--rules", "mine.toml", "--rules", "onnxruntime")
    unused = json.loads(cli("plan", "digits_cnn.onnx", "--format=json", *ours).stdout)["unused"]
    assert unused[0] == "mistaken"
    output = cli("plan", "digits_cnn.onnx", *ours).stdout
    assert "mistaken\n" in output
    assert len(unused) > 2
    assert f"{len(unused) - 1} shipped rules" in output
    assert unused[1] not in output
    data = ("--data", "digits_cnn_calib.npz", "--samples", "4", "--no-validate", "--dry-run")
    output = cli("insert", "digits_cnn.onnx", *ours, *data).stdout
    assert "mistaken\n" in output
    assert "shipped rule" not in output
    assert "without a match" not in cli("insert", "digits_cnn.onnx", *data).stdout


# -- the other verbs -------------------------------------------------------------------------------


def test_insert_and_inspect_agree_on_weight_ranges(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """Insert and inspect tell one range of a symmetric weight, whose type has one negative value more."""
    arguments = ("insert", "digits_cnn.onnx", "--rules", "weight_only", "-o", "made.onnx", "-v")
    weight_lines = [
        {line.split()[0].partition("/quant")[0].partition(":")[0]: line.split()[-1] for line in lines if "±" in line}
        for lines in (cli(*arguments).stdout.splitlines(), cli("inspect", "made.onnx").stdout.splitlines())
    ]
    assert len(weight_lines[0]) == 9
    assert weight_lines[0] == weight_lines[1]


def test_insert_is_as_verbose_as_asked(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """Insert prints a summary, with -v also each tensor, and with -q nothing."""
    summary, details, nothing = (
        cli("insert", "digits_cnn.onnx", "--rules", "weight_only", "-o", "made.onnx", "--force", *flags).output
        for flags in ((), ("-v",), ("-q",))
    )
    assert nothing == ""
    assert summary.count("\n") <= 15
    sites = [site.tensor for site in gq.plan("digits_cnn.onnx", rules="weight_only").sites]
    assert all(f"{tensor}  " in details for tensor in sites)
    assert not any(f"{tensor}  " in summary for tensor in sites)
    assert details.endswith(summary.splitlines()[-1] + "\n")
    cli("insert", "digits_cnn.onnx", "--rules", "weight_only", "-o", "made.onnx", "--force", "-v", "-q", code=2)


def test_plan_as_text_and_as_json_to_a_file(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """The table has the counts of the JSON; -o writes a file and does not replace one."""
    text = cli("plan", "digits_cnn.onnx").stdout
    data = json.loads(cli("plan", "digits_cnn.onnx", "--format", "json").stdout)
    assert (data["schema"], data["format"], data["rules"]) == (2, "onnx", ["onnxruntime"])
    tensors, skipped = ({tuple(entry["tensor"].values()) for entry in data[key]} for key in ("sites", "skips"))
    assert f"{len(tensors)} tensors to quantize: " in text
    assert f"; {len(skipped)} left in float." in text
    assert cli("plan", "digits_cnn.onnx", "--format", "json", "-o", "plan.json").output == ""
    assert json.loads(Path("plan.json").read_text()) == data
    cli("plan", "digits_cnn.onnx", "-o", "plan.json", code=2)
    cli("plan", "digits_cnn.onnx", "-o", "plan.json", "--force")
    assert Path("plan.json").read_text() == text


def test_inspect_in_all_forms(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """Text, JSON and DOT tell of the same ops."""
    data = json.loads(cli("inspect", "digits_cnn.onnx", "--format", "json").stdout)
    assert data["inputs"] == [{"name": "image", "dtype": "float32", "shape": [None, 8, 8, 1]}]
    assert (data["opset"], data["ops"]["Conv"], data["quantization"]) == (13, 7, [])
    text = cli("inspect", "digits_cnn.onnx").stdout
    assert "onnx, opset 13" in text
    assert "7 Conv" in text
    drawn = cli("inspect", "digits_cnn.onnx", "--format", "dot").stdout
    assert drawn.startswith("digraph")
    assert drawn.count("Conv") >= 7
    cli("inspect", "digits_cnn.onnx", "--format", "dot", "-o", "model.dot")
    assert Path("model.dot").read_text() == drawn


def test_explain_lists_each_rule(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """The winner, and why the others do not apply; an unknown name is an error with close ones."""
    text = cli("explain", "digits_cnn.onnx", "stem/relu:0").stdout
    assert "stem/relu:0 read by depthwise/conv[0]" in text
    assert "conv-output" in text
    result = cli("explain", "digits_cnn.onnx", "stem/relo", code=2)
    assert "stem/relu" in result.stderr


def test_explain_tells_integer_weights_from_integer_products(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MatMulNBits multiplies in float unless its accuracy level says otherwise."""
    monkeypatch.chdir(tmp_path)
    model = parser.parse_model('<ir_version: 8, opset_import: ["": 21]> g (float[n,1024] x) => (float[n,1024] y) {}')
    weight = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    model.graph.node.append(helper.make_node("MatMul", ["x", "w"], ["y"], "product"))
    Path("net.onnx").write_bytes(model.SerializeToString())
    cli("insert", "net.onnx", "--rules", "w4a8")
    text = cli("explain", "net.quant.onnx", "product", "--for", "onnxruntime").stdout
    assert "onnxruntime runs it with integer weights, as MatMulNBits" in " ".join(text.split())


def test_rules_verbs(cli: Callable[..., Any], cnn_folder: Path) -> None:
    """Rule files are listed, shown, checked and described by a schema."""
    names = [line.split()[0] for line in cli("rules", "list").stdout.splitlines()]
    assert {"onnxruntime", "tflite", "tensorrt", "fixed_point", "weight_only"} <= set(names)
    for name in names[1:]:
        output = cli("rules", "show", name).stdout
        Path("copy.toml").write_text(output)
        assert "no mistakes" in cli("rules", "check", "copy.toml").stdout
    schema = json.loads(cli("rules", "schema").stdout)
    assert "rule" in schema["properties"]
    assert "onnxruntime" in cli("rules", "show", "onxruntime", code=2).stderr


# -- exit codes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (FindingsError, 1),
        (UsageError, 2),
        (RuleError, 2),
        (DataError, 2),
        (NeedsDataError, 2),
        (ModelError, 3),
        (MissingDependencyError, 4),
        (KeyboardInterrupt, 130),
    ],
)
def test_each_ending_has_its_exit_code(
    cli: Callable[..., Any], cnn_folder: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], code: int
) -> None:
    """The class of an error decides the exit code, and its message is the only output."""

    def fail(path: Path, **options: object) -> None:
        raise kind("It broke. Mend it.")

    monkeypatch.setattr(models, "load", fail)
    result = cli("inspect", "digits_cnn.onnx", code=code)
    message = "error: It broke. Mend it.\n" if issubclass(kind, GraphQuantError) else "Interrupted.\n"
    assert (result.stdout, result.stderr) == ("", message)


@pytest.mark.slow
def test_missing_tensorflow_ends_with_4(cnn_folder: Path) -> None:
    """Without TensorFlow, calibration of its models prints the command that installs it."""
    script = (
        "import sys; sys.modules['tensorflow'] = None; from graphquant.cli import main;"
        " main(['insert', 'digits_cnn.pb', '--data', 'digits_cnn_calib.npz'])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=cnn_folder)
    assert (result.returncode, result.stdout) == (4, "")
    assert "graphquant[tensorflow]" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("model", "out"),
    [
        ("digits_cnn.onnx", "out.onnx"),
        pytest.param("digits_cnn.pb", "o.pb", marks=pytest.mark.slow),
        ("digits_cnn_saved_model", "out"),
    ],
)
def test_interrupt_exits_with_130_and_writes_no_file(cnn_folder: Path, model: str, out: str) -> None:
    """Ctrl-C while the model is written gives exit code 130 and no part of a file."""
    script = (
        "import os, signal, pathlib; from graphquant.cli import main\n"
        "def replace(self, target): os.kill(os.getpid(), signal.SIGINT)\n"
        "pathlib.Path.replace = replace\n"
        "main(['insert', 'MODEL', '--rules', 'weight_only', '-o', 'OUT', '--report', 'report.json'])"
    )
    text = script.replace("MODEL", model).replace("OUT", out)
    before = sorted(cnn_folder.rglob("*"))
    result = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, cwd=cnn_folder)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "Interrupted.\n")
    assert sorted(cnn_folder.rglob("*")) == before


def assert_interrupted(command: list[str], environment: dict[str, str] | None = None) -> None:
    """Run a command that Ctrl-C ends with one line."""
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "Interrupted.\n")


def test_interrupt_during_imports(tmp_path: Path) -> None:
    """Ctrl-C before the command has started gives exit code 130 and one line, as later."""
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    command = [sys.executable, "-m", "graphquant", "--version"]
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    assert_interrupted(command, environment)


def test_interrupt_waits_for_the_end_of_an_import(tmp_path: Path) -> None:
    """Ctrl-C in a method that Python calls while it makes a class of a module is not a RuntimeError."""
    (tmp_path / "click.py").write_text(
        "import os, signal, sys\n"
        "class Name:\n"
        "    def __set_name__(self, *_): os.kill(os.getpid(), signal.SIGINT)\n"
        "class Owner: name = Name()\n"
        "sys.path.remove(os.path.dirname(__file__))\n"
        "del sys.modules['click']\n"
        "import click"
    )
    command = [sys.executable, "-m", "graphquant", "rules", "list"]
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    assert_interrupted(command, environment)


def test_interrupt_while_arguments_are_parsed() -> None:
    """The parser of click prints "Aborted!", with exit code 1, for Ctrl-C before the command is invoked."""
    script = (
        "import os, signal, sys, click\n"
        "parse_args = click.Group.parse_args\n"
        "def interrupt(*arguments):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return parse_args(*arguments)\n"
        "click.Group.parse_args = interrupt\n"
        "sys.argv = ['graphquant', 'rules', 'list']\n"
        "from graphquant.__main__ import run\n"
        "run()"
    )
    assert_interrupted([sys.executable, "-c", script])


def test_interrupt_in_a_destructor_is_not_lost() -> None:
    """Python only prints a KeyboardInterrupt of a destructor, so Ctrl-C is sent again."""
    script = (
        "import signal, sys, time, graphquant.cli\n"
        "class Destroyed:\n"
        "    def __del__(self): raise KeyboardInterrupt\n"
        "def main(prog_name, obj):\n"
        "    signal.pthread_sigmask(signal.SIG_SETMASK, obj)\n"
        "    Destroyed()\n"
        "    time.sleep(20)\n"
        "graphquant.cli.main = main\n"
        "from graphquant.__main__ import run\n"
        "run()"
    )
    assert_interrupted([sys.executable, "-c", script])


@pytest.mark.parametrize("code", ["class Owner: name = Name()", "raise SystemError('in: KeyboardInterrupt: ')"])
def test_interrupt_during_the_imports_of_a_command(tmp_path: Path, code: str) -> None:
    """Ctrl-C that an import of a command turns into another error ends it with one line; other errors do not."""
    (tmp_path / "numpy.py").write_text(
        f"class Name:\n    def __set_name__(self, *_): raise KeyboardInterrupt\n{code}", encoding="utf-8"
    )
    command = [sys.executable, "-m", "graphquant", "inspect", str(tmp_path / "m.onnx")]
    (tmp_path / "m.onnx").touch()
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    assert_interrupted(command, environment)
    (tmp_path / "numpy.py").write_text("raise SystemError('broken')", encoding="utf-8")
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "SystemError: broken" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["insert", "digits_cnn.onnx", "--rules", "weight_only"], "out.onnx"),
        (["insert", "digits_cnn_saved_model", "--rules", "weight_only"], "out"),
        (["calibrate", "digits_cnn.onnx", "--data", "digits_cnn_calib.npz"], "out.gqs"),
    ],
)
def test_leftovers_of_a_killed_run(
    cli: Callable[..., Any], cnn_folder: Path, arguments: list[str], output: str
) -> None:
    """A run that is killed while it writes leaves hidden files, which the next run to the same output removes."""
    script = (
        "import os, signal, pathlib, sys; from graphquant.cli import main\n"
        "pathlib.Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "main(sys.argv[1:])"
    )
    before = {path.name for path in cnn_folder.iterdir()}
    command = [sys.executable, "-c", script, *arguments, "-o", output]
    assert subprocess.run(command, check=False, cwd=cnn_folder).returncode == -signal.SIGKILL
    leftovers = {path.name for path in cnn_folder.iterdir()} - before
    assert len(leftovers) == 2
    assert all(name.startswith(f".{output}.") for name in leftovers)
    cli(*arguments, "-o", output)
    assert {path.name for path in cnn_folder.iterdir()} - before == {output}


@pytest.mark.parametrize("verb", ["insert", "calibrate", "strip"])
def test_two_runs_with_one_output(cli: Callable[..., Any], cnn_folder: Path, verb: str) -> None:
    """A second run to the same output is refused while the first one runs, and its file is not touched."""
    output = cnn_folder / ("out.gqs" if verb == "calibrate" else "out.onnx")
    data = ("--data", cnn_folder / "digits_cnn_calib.npz") if verb != "strip" else ()
    with lock_output(output):
        arguments = (verb, cnn_folder / "digits_cnn.onnx", *data, "-o", output, "--force")
        message = Context().run(cli, *arguments, code=2).stderr
    assert str(output) in message
    assert not output.exists()


def test_usage_errors_end_with_2(cnn_folder: Path) -> None:
    """Unknown verbs and options, and missing arguments, are click's usage errors."""
    for arguments in (["quantise"], ["insert"], ["insert", "digits_cnn.onnx", "--date"], ["plan", "a", "--format=xml"]):
        result = program(*arguments)
        assert (result.returncode, result.stdout) == (2, "")
        assert "error: " in result.stderr
        assert "Traceback" not in result.stderr


# -- terminals and pipes ---------------------------------------------------------------------------


@pytest.mark.slow
def test_pipes_get_plain_text_and_results_only(cnn_folder: Path) -> None:
    """In a pipe, stdout has the table and stderr is empty, both without escape sequences."""
    result = program("insert", "digits_cnn.onnx", "--data", "digits_cnn_calib.npz")
    assert (result.returncode, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout
    assert result.stdout.splitlines()[-1].endswith("Written to digits_cnn.quant.onnx")


@pytest.mark.slow
def test_terminals_get_progress_on_stderr_and_80_columns(cnn_folder: Path) -> None:
    """On a terminal the progress bar goes to stderr, and no line of the table is wider than 80 columns."""
    out, err = on_terminal("insert", "digits_cnn.onnx", "--data", "digits_cnn_calib.npz")
    assert "calibrating" in err
    assert "calibrating" not in out
    plain = _without_escapes(out)
    assert "digits_cnn.quant.onnx" in plain
    assert max(len(line.rstrip()) for line in plain.splitlines()) <= 80
    for arguments in (["rules", "list"], ["plan", "digits_cnn.onnx"], ["inspect", "digits_cnn.quant.onnx"]):
        plain = _without_escapes(on_terminal(*arguments)[0])
        assert max(len(line.rstrip()) for line in plain.splitlines()) <= 80
    assert "residual_2/conv" in plain  # of the last command


def _without_escapes(text: str) -> str:
    import re

    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_no_color_is_heard(cnn_folder: Path) -> None:
    """NO_COLOR takes the colours out on a terminal too."""
    os.environ["NO_COLOR"] = "1"
    try:
        ENVIRONMENT["NO_COLOR"] = "1"
        out, _ = on_terminal("plan", "digits_cnn.onnx")
    finally:
        del os.environ["NO_COLOR"], ENVIRONMENT["NO_COLOR"]
    assert "\x1b[3" not in out


def test_closed_pipe_ends_quietly(cnn_folder: Path) -> None:
    """`graphquant inspect MODEL | head -1` ends quietly."""
    command = f"{shlex.quote(sys.executable)} -m graphquant inspect digits_cnn.onnx --format json | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)  # noqa: S602  # a pipe
    assert (result.stdout, result.stderr) == ("{\n", "")


def test_installed_command_is_the_module(cnn_folder: Path) -> None:
    """`python -m graphquant` calls itself graphquant and knows its version."""
    import graphquant

    assert program("--version").stdout.strip().endswith(graphquant.__version__)
    assert program("--help").stdout.startswith("Usage: ")


NAME = "a\x1b[31m[/]\x9b:x:\nb\u202e"
"""A name that would colour a terminal, break a line, turn the reading direction or be markup."""


@pytest.mark.parametrize("verb", [("inspect",), ("inspect", "--format", "dot"), ("plan",), ("insert",), ("explain",)])
def test_names_cannot_act_on_the_terminal(cli: Callable[..., Any], tmp_path: Path, verb: tuple[str, ...]) -> None:
    """Names in a model are spelled out, in results, in files and in errors alike."""
    path, out = tmp_path / "named.onnx", tmp_path / "out.onnx"
    weight = numpy_helper.from_array(np.ones((4, 3, 1, 1), np.float32), f"{NAME}w")
    node = helper.make_node("Conv", ["x", f"{NAME}w"], [f"{NAME}y"], name=NAME)
    inputs = [helper.make_tensor_value_info("x", 1, [1, 3, 4, 4])]
    outputs = [helper.make_tensor_value_info(f"{NAME}y", 1, None)]
    graph = helper.make_graph([node], "named", inputs, outputs, [weight])
    path.write_bytes(helper.make_model(graph, ir_version=9).SerializeToString())
    options = {"insert": ("-o", out, "--rules", "fixed_point", "-v"), "explain": (NAME,)}.get(verb[0], ())
    output = cli(verb[0], path, *options, *verb[1:]).stdout
    assert r"a\x1b[31m[/]\x9b:x:".replace("\\", "\\\\" if "dot" in verb else "\\") in output
    assert all(char.isprintable() or char == "\n" for char in output)
    if verb[0] in {"inspect", "plan"}:
        cli(*verb[:1], path, *verb[1:], "-o", tmp_path / "out.txt")
        assert (tmp_path / "out.txt").read_text("utf-8") == output


def test_errors_are_fit_for_a_terminal(cli: Callable[..., Any], tmp_path: Path) -> None:
    """An error that quotes a file's content neither acts on the terminal nor fills it."""
    path = tmp_path / "long.textproto"
    path.write_text("a" * 100_000)
    message = cli("inspect", path, code=3).stderr
    assert len(message) < 3_000
    assert "more characters)" in message
    assert r"no\x1b[31m.onnx" in cli("inspect", tmp_path / "no\x1b[31m.onnx", code=3).stderr


@pytest.mark.parametrize(
    ("verb", "unbuffered"),
    [
        (["plan"], ""),
        (["inspect", "--format", "json"], "1"),
        pytest.param(["plan"], "1", marks=pytest.mark.slow),
        pytest.param(["inspect", "--format", "json"], "", marks=pytest.mark.slow),
    ],
)
def test_standard_output_that_is_full(samples: Path, verb: list[str], unbuffered: str) -> None:
    """A full disk under stdout is reported in a sentence."""
    full = Path("/dev/full")
    if not full.is_char_device():
        pytest.skip("this system has no /dev/full")
    command = [sys.executable, "-m", "graphquant", verb[0], str(samples / "digits_cnn.onnx"), *verb[1:]]
    environment = {**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered}
    with full.open("w") as out:
        process = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert process.returncode == 2
    assert process.stderr.startswith("error: ")
    assert f" standard output: {os.strerror(errno.ENOSPC)}" in process.stderr
    assert process.stderr.count("\n") == 1


def test_errors_without_a_file_name(cli: Callable[..., Any], samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a disk or a service is not one of the standard output, although it names no file."""

    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError("connection lost")

    monkeypatch.setattr("graphquant.api.plan.make_plan", fail)
    message = cli("plan", samples / "digits_cnn.onnx", code=2).stderr
    assert "connection lost" in message
    assert "standard output" not in message


def test_names_that_the_encoding_lacks(tmp_path: Path) -> None:
    """Letters that the terminal's encoding lacks are spelled out."""
    path = tmp_path / "named.onnx"
    ends = [[helper.make_tensor_value_info(name, 1, [1])] for name in ("日本", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["日本"], ["y"])], "named", *ends)
    path.write_bytes(helper.make_model(graph, ir_version=9).SerializeToString())
    command = [sys.executable, "-m", "graphquant", "inspect", str(path)]
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert process.returncode == 0, process.stderr
    assert r"\u65e5\u672c" in process.stdout


def test_closed_standard_streams(cnn_folder: Path) -> None:
    """A command whose standard streams are closed writes its file, and no other stream gets their numbers."""
    script = 'exec "$0" -m graphquant insert digits_cnn.onnx --rules weight_only -o quantized.onnx -v <&- >&- 2>&-'
    command = ["sh", "-c", script, sys.executable]
    assert subprocess.run(command, check=False, cwd=cnn_folder, env=ENVIRONMENT).returncode == 0
    assert "dequantize" in {op.kind for op in gq.load(cnn_folder / "quantized.onnx").main.ops()}
