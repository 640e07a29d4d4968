"""A batch of many models gives the same results for any number of workers, and repeats no work."""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from support.batch_reports import read_outputs, report_without_times

from graphquant.batch.types import read_report

pytestmark = pytest.mark.slow  # more than a hundred models, twice

SECONDS = 3.0
"""Limit of the CPU time of a run without work."""


def measure_batch(*arguments):
    """Run a batch to its end. Return its report without times, and the CPU seconds of all its processes."""
    command = [sys.executable, "-m", "graphquant", "batch", "models.toml", "--cache-dir", "cache", "--report", "r.json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode in {0, 1}, process.stderr
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return report_without_times(read_report(Path("r.json"))), seconds


def test_many_models(tmp_path, samples, monkeypatch):
    """One worker and two give the same bytes and report. A further run finds all outputs unchanged, in little time."""
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    cases = sorted(Path(onnx.__file__).parent.joinpath("backend/test/data").glob("*/*/model.onnx"))
    for case in cases:
        shutil.copy(case, f"models/{case.parent.name}.onnx")
    for path in samples.glob("*.onnx"):
        shutil.copy(path, "models")
    Path("models.toml").write_text(
        "[defaults]\nallow_empty = true\ndata = 'random:8'\noutput = 'out/{stem}.quant.onnx'\n"
        "[[model]]\npath = 'models/*.onnx'\n"
    )
    report, _ = measure_batch("-j", "1", "--no-cache")
    outputs = read_outputs()
    shutil.rmtree("out")
    parallel, _ = measure_batch("-j", "2")
    assert parallel == report
    assert read_outputs() == outputs
    assert len(report["outcomes"]) > len(cases) >= 100
    failures = {
        outcome["name"]: outcome["problem"]["message"]
        for outcome in report["outcomes"]
        if outcome["status"] == "failed"
    }
    assert all("random data" in message or "onnxruntime" in message for message in failures.values()), failures
    assert len(failures) < 10
    assert len(outputs) == len(report["outcomes"]) - len(failures)
    for name in failures:
        Path(name).unlink()
    report["outcomes"] = [outcome for outcome in report["outcomes"] if outcome["name"] not in failures]
    second, seconds = min((measure_batch("-j", "2") for _ in range(2)), key=lambda pair: pair[1])
    assert {outcome["status"] for outcome in second["outcomes"]} == {"unchanged"}
    assert [outcome | {"status": "done"} for outcome in second["outcomes"]] == report["outcomes"]
    assert read_outputs() == outputs
    assert seconds < SECONDS
