"""Report options of `graphquant batch`, on models that need no data."""

import json
import re
import shutil

import pytest
from support.batch_reports import report_without_times

from graphquant.batch import reports
from graphquant.batch.reports import REPORTS
from graphquant.batch.types import read_report
from graphquant.errors import UsageError


@pytest.fixture
def batch_of_two(tmp_path, samples, cli, monkeypatch):
    """Return a function that quantizes the weights of two sample models in an empty folder."""
    for name in ("digits_cnn.onnx", "digits_rnn.onnx"):
        shutil.copy(samples / name, tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(*options, code=0):
        models = ("digits_cnn.onnx", "digits_rnn.onnx", "--rules", "weight_only")
        return cli("batch", *models, "-j", 1, "--cache-dir", tmp_path / "kept", *options, code=code)

    return run


@pytest.mark.slow
def test_reports(batch_of_two, tmp_path):
    """A report of each format is written, stdout has the selected one, and a second run reports the same."""
    options = [option for suffix in REPORTS for option in ("--report", f"report{suffix}")]
    printed = batch_of_two(*options, "--format", "json").stdout
    assert printed == tmp_path.joinpath("report.json").read_text("utf-8")
    first = read_report(tmp_path / "report.json")
    assert [(outcome.name, outcome.status, outcome.sites > 0) for outcome in first.outcomes] == [
        ("digits_cnn.onnx", "done", True),
        ("digits_rnn.onnx", "done", True),
    ]
    assert "### ✅" in tmp_path.joinpath("report.md").read_text("utf-8")
    assert len([*tmp_path.joinpath("report_graphs").iterdir()]) == 2
    assert tmp_path.joinpath("report.html").read_text("utf-8").count('<a href="report_graphs/digits_') == 2
    assert batch_of_two("--report", "second.json", "--format", "github").stdout == ""
    second = report_without_times(read_report(tmp_path / "second.json"))
    for outcome in second["outcomes"]:
        assert outcome.pop("status") == "unchanged"
    expected = report_without_times(first)
    for outcome in expected["outcomes"]:
        assert outcome.pop("status") == "done"
    assert second == expected


@pytest.mark.slow
def test_each_format_reports_failures(batch_of_two, cli, tmp_path):
    """A failing model is reported on stdout for GitHub and in JUnit XML."""
    tmp_path.joinpath("broken.onnx").write_bytes(b"no model")
    result = batch_of_two("broken.onnx", "--format", "github", "--report", "report.xml", code=1)
    (line,) = result.stdout.splitlines()
    assert line.startswith("::error file=broken.onnx,title=GQ201::broken.onnx: ")
    assert '<failure type="ModelError"' in tmp_path.joinpath("report.xml").read_text("utf-8")


@pytest.mark.slow
def test_unwritable_report(batch_of_two, monkeypatch):
    """If a report cannot be written, the summary is printed and the exit code is 2."""

    def raise_disk_full(path, report, progress):
        raise UsageError(f"{path} cannot be written: No space left on device. Give another file.")

    monkeypatch.setattr(reports, "write_report", raise_disk_full)
    result = batch_of_two("--report", "report.md", code=2)
    assert "2 models: 2 done;" in result.stdout
    assert "report.md cannot be written" in result.stderr


@pytest.mark.slow
def test_compare(batch_of_two, tmp_path):
    """A regression is in the report, and fails the batch only with --fail-on."""
    batch_of_two("--report", "last.json")
    assert "regression" not in batch_of_two("--compare", "last.json", "--fail-on", "regression").stdout
    data = json.loads(tmp_path.joinpath("last.json").read_text("utf-8"))
    data["outcomes"][0]["size_after"] //= 2
    tmp_path.joinpath("last.json").write_text(json.dumps(data), "utf-8")
    assert "1 regression;" in batch_of_two("--compare", "last.json").stdout
    batch_of_two("--compare", "last.json", "--fail-on", "regression", "--report", "now.json", code=1)
    (change,) = read_report(tmp_path / "now.json").changes
    assert (change.name, change.kind, change.level) == ("digits_cnn.onnx", "size", "error")


@pytest.mark.slow
def test_merge(batch_of_two, cli, tmp_path):
    """The reports of two shards merge into one. A missing shard is an error."""
    batch_of_two("--report", "whole.json")
    whole = json.loads(tmp_path.joinpath("whole.json").read_text("utf-8"))
    for shard, outcome in enumerate(whole["outcomes"]):
        part = {**whole, "outcomes": [outcome], "shard": [shard + 1, 2]}
        tmp_path.joinpath(f"{shard}.json").write_text(json.dumps(part), "utf-8")
    cli("batch", "--merge", "1.json", "0.json", "--report", "merged.json")
    assert read_report(tmp_path / "merged.json") == read_report(tmp_path / "whole.json")
    assert " of shard 2/2." in cli("batch", "--merge", "0.json", code=2).stderr
    part["outcomes"][0]["status"] = "skipped"
    tmp_path.joinpath("1.json").write_text(json.dumps(part), "utf-8")
    assert "1 not started" in cli("batch", "--merge", "1.json", "0.json", code=1).stdout
    assert "is not JSON" in cli("batch", "--merge", "digits_cnn.onnx", code=2).stderr


@pytest.mark.slow
def test_attest_and_verify(batch_of_two, tmp_path):
    """Attestations are reproducible with and without the cache. --verify reports every difference."""
    batch_of_two("--attest", "--report", "last.json")
    path = tmp_path / "digits_cnn.quant.onnx.intoto.json"
    text = path.read_text("utf-8")
    statement = json.loads(text)
    assert statement["subject"] == [
        {"name": name, "digest": {"sha256": digest}}
        for name, digest in read_report(tmp_path / "last.json").outcomes[0].products.items()
    ]
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert statement["predicate"]["buildDefinition"]["externalParameters"]["rules"] == ["weight_only"]
    path.unlink()
    batch_of_two("--attest")
    assert path.read_text("utf-8") == text
    batch_of_two("--attest", "--no-cache")
    assert path.read_text("utf-8") == text
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.onnx*")}
    batch_of_two("--verify", "--compare", "last.json")
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.onnx*")} == before

    output = tmp_path / "digits_rnn.quant.onnx"
    output.write_bytes(output.read_bytes() + b"\0")
    path.write_text(text.replace('"sha256": "', '"sha256": "0'), "utf-8")
    data = json.loads(tmp_path.joinpath("last.json").read_text("utf-8"))
    data["outcomes"][0]["products"] = {"digits_cnn.quant.onnx": "0" * 64}
    data["outcomes"][0]["digests"]["model"] = "0" * 64
    data["outcomes"][0]["versions"]["onnx"] = "1.0"
    tmp_path.joinpath("last.json").write_text(json.dumps(data), "utf-8")
    output_text = batch_of_two("--verify", "--compare", "last.json", code=1).stdout
    patterns = (
        r"digits_rnn\.onnx: the output .*: digits_rnn\.quant\.onnx$",
        r"digits_cnn\.onnx: the attestation .*: digits_cnn\.quant\.onnx$",
        r"digits_cnn\.onnx: the report .*: digits_cnn\.quant\.onnx; .*: the model, onnx \(1\.0",
    )
    assert [pattern for pattern in patterns if not re.search(f"^{pattern}", output_text, re.MULTILINE)] == []
    assert "2 done, 3 differences;" in output_text
    output.unlink()
    assert "digits_rnn.quant.onnx is missing" in batch_of_two("--verify", code=1).stdout
    path.write_text("{}", "utf-8")
    assert "in-toto statement" in batch_of_two("--verify", code=1).stdout


@pytest.mark.slow
def test_verifying_a_folder(cli, samples, tmp_path):
    """--verify reports additional and missing files of a SavedModel."""
    out, cache = tmp_path / "net", tmp_path / "kept"
    command = ("batch", samples / "digits_rnn_saved_model", "--rules", "weight_only", "-o", out, "--cache-dir", cache)
    cli(*command)
    out.joinpath("assets").mkdir(exist_ok=True)
    out.joinpath("assets", "more.txt").write_text("more", "utf-8")
    assert re.search(r"the output .*: net/assets/more\.txt is not", cli(*command, "--verify", code=1).stdout)
    out.joinpath("assets", "more.txt").unlink()
    out.joinpath("variables", "variables.index").unlink()
    assert "net/variables/variables.index is missing" in cli(*command, "--verify", code=1).stdout


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("--sqnr-step", "1"), "--sqnr-step"),
        (("--fail-on", "regression"), "--fail-on regression"),
        (("--merge", "--verify"), "--merge"),
        (("--verify", "--attest"), "--verify"),
        (("--report", "x.txt"), "'.txt'"),
        (("--report", "net.json/x.md"), "net.json"),
        (("--compare", "nowhere.json"), "nowhere.json"),
        (("net.json", "--report", "./net.json"), "--report net.json"),
        (("--attest", "-o", "memory://models/{stem}.onnx"), "--attest"),
        (("--verify", "-o", "memory://models/{stem}.onnx"), "--verify"),
        (("--compare", "a.json", "--fail-on", "regression", "--report", "./a.json"), "--report a.json"),
    ],
)
def test_conflicting_options(batch_of_two, options, name, tmp_path):
    """The command rejects conflicting options before any work starts, and names the option."""
    shutil.copy(tmp_path / "digits_cnn.onnx", tmp_path / "net.json")
    assert name in batch_of_two(*options, code=2).stderr
    assert not tmp_path.joinpath("digits_cnn.quant.onnx").exists()


def test_merge_without_reports(cli):
    """--merge without reports is an error that names the option."""
    assert "--merge" in cli("batch", "--merge", code=2).stderr
