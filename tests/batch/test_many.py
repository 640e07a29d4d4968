"""A batch of many models: the same for any number of workers, and nothing is done twice."""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from graphquant.batch.types import batch_report_json, read_report

pytestmark = pytest.mark.slow  # more than a hundred models, twice

SECONDS = 3.0
"""What a run may take that has nothing to do, of a processor that does nothing else."""


def run(*arguments):
    """Runs a batch to its end; its report without times, and seconds of a processor that it took with its workers."""
    command = [sys.executable, "-m", "graphquant", "batch", "models.toml", "--cache-dir", "cache", "--report", "r.json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    made = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert made.returncode in {0, 1}, made.stderr
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return batch_report_json(read_report(Path("r.json")), times=False), took


def written():
    """Names and bytes of all outputs."""
    return {path.name: path.read_bytes() for path in Path("out").iterdir()}


def test_many_models(tmp_path, samples, monkeypatch):
    """One worker and two make the same bytes and the same report; a second run works on nothing and takes no time."""
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    cases = sorted(Path(onnx.__file__).parent.joinpath("backend/test/data").glob("*/*/model.onnx"))
    for case in cases:
        shutil.copy(case, f"models/{case.parent.name}.onnx")
    for path in samples.glob("*.onnx"):
        shutil.copy(path, "models")
    Path("models.toml").write_text(
        "[defaults]\ndata = 'random:8'\noutput = 'out/{stem}.quant.onnx'\n[[model]]\npath = 'models/*.onnx'\n"
    )
    report, _ = run("-j", "1", "--no-cache")
    outputs = written()
    shutil.rmtree("out")
    again, _ = run("-j", "2")
    assert again == report
    assert written() == outputs
    assert len(report["outcomes"]) > len(cases) >= 100
    unfit = {one["name"]: one["problem"]["message"] for one in report["outcomes"] if one["status"] == "failed"}
    assert all("random data" in said or "onnxruntime" in said for said in unfit.values()), unfit
    assert len(unfit) < 10
    assert len(outputs) == len(report["outcomes"]) - len(unfit)
    for name in unfit:
        Path(name).unlink()
    report["outcomes"] = [one for one in report["outcomes"] if one["name"] not in unfit]
    second, took = min((run("-j", "2") for _ in range(2)), key=lambda pair: pair[1])
    assert {one["status"] for one in second["outcomes"]} == {"unchanged"}
    assert [one | {"status": "done"} for one in second["outcomes"]] == report["outcomes"]
    assert written() == outputs
    assert took < SECONDS
