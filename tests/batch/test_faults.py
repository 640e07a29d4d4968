"""What goes wrong around a batch: it is killed, the disk is full, a folder is read-only."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from graphquant.batch.types import batch_report_json, read_report

pytestmark = pytest.mark.slow  # each starts the program and its workers

KILLS = 20


def command(*arguments):
    """The program, to be run here."""
    return [sys.executable, "-m", "graphquant", "batch", "--cache-dir", "cache", "--report", "report.json", *arguments]


def run(*arguments):
    """Runs it to its end."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False)


def told():
    """What the report tells, without times."""
    return batch_report_json(read_report(Path("report.json")), times=False)


@contextmanager
def mounted(folder, *options):
    """A small file system of its own at `folder`; the test is skipped where that cannot be had."""
    folder.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting needs root")
    made = subprocess.run(["mount", "-t", "tmpfs", *options, "none", folder], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("nothing may be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def here(tmp_path, samples, monkeypatch):
    """A folder with a manifest of twelve entries for two models."""
    lines = ["[defaults]", "samples = 2"]
    for stem in ("digits_cnn", "digits_rnn"):
        shutil.copy(samples / f"{stem}.onnx", tmp_path)
        shutil.copy(samples / f"{stem}_calib.npz", tmp_path)
        for place in range(6):
            lines += ["[[model]]", f"path = '{stem}.onnx'", f"variant = 'v{place}'", f"data = '{stem}_calib.npz'"]
            lines += [f"output = 'out/{stem}_{place}.onnx'", f"samples = {place + 1}"]
    tmp_path.joinpath("graphquant.toml").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def outputs():
    """Names and bytes of what is in the folder of outputs; a name that ends with a suffix of a model is whole."""
    return {path.name: path.read_bytes() for path in Path("out").iterdir()} if Path("out").is_dir() else {}


def journaled():
    """The names in the journal, in its order; a last line that was cut off is none."""
    lines = [line for path in Path("cache/batches").glob("*.jsonl") for line in path.read_bytes().split(b"\n")[:-1]]
    return [json.loads(line)["name"] for line in lines]


def _killed(finished, chance, *arguments):
    """Runs the batch and kills it: soon, or soon after it has finished one more, however fast the machine is."""
    more = chance.choice([0, 1])
    process = subprocess.Popen(
        command("-j", "2", "--no-cache", *arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while more and process.poll() is None and len(journaled()) <= finished:
        time.sleep(0.01)
    with suppress(subprocess.TimeoutExpired):
        process.wait(chance.uniform(0, 0.3 if more else 2.0))
    process.kill()
    process.wait()


def test_killed_and_resumed(here):
    """Killed at any moment, twenty times over, it goes on where it was: nothing is done twice, nothing is ever half."""
    assert run("-j", "2", "--no-cache").returncode == 0
    expected, report = outputs(), told()
    assert len(expected) == 12
    shutil.rmtree("out")
    shutil.rmtree("cache")
    chance = random.Random(7)  # noqa: S311  # moments to kill at, no secrets
    finished, lengths = [], set()
    for kill in range(KILLS):
        _killed(len(finished), chance, *(["--resume"] if kill else []))
        now = journaled()
        assert now[: len(finished)] == finished
        assert len(set(now)) == len(now)
        finished = now
        lengths.add(len(now))
        for name, data in outputs().items():
            assert name.startswith(".") or data == expected[name]
    assert len(lengths) > KILLS // 4, "hardly a kill came in the midst of the work"
    last = run("-j", "2", "--no-cache", "--resume")
    assert last.returncode == 0
    assert outputs() == expected
    assert told() == report
    assert sorted(journaled()) == sorted(one["name"] for one in report["outcomes"])
    assert run("-j", "2", "--no-cache", "--resume").returncode == 0
    assert len(journaled()) == 12


def test_a_full_disk(here):
    """What does not fit is told of its model, nothing half is left, and the rest is done."""
    with mounted(here / "full", "-o", "size=48k"):
        text = Path("graphquant.toml").read_text().replace("out/digits_cnn", "full/digits_cnn")
        Path("graphquant.toml").write_text(text)
        result = run("-j", "2")
        assert result.returncode == 1, result.stderr
        statuses = {one["output"]: (one["status"], one["problem"]) for one in told()["outcomes"]}
        failed = {path: problem for path, (status, problem) in statuses.items() if status == "failed"}
        assert len(failed) == 5  # each takes 28 kB
        assert all(path.startswith("full/") for path in failed)
        assert {problem["kind"] for problem in failed.values()} == {"UsageError"}
        assert all("No space left on device" in problem["message"] for problem in failed.values())
        assert len(list(Path("full").iterdir())) == 1
    assert len(outputs()) == 6


def test_a_read_only_folder(here):
    """Each model that was to be written there is told; the rest is done."""
    with mounted(here / "fixed", "-o", "ro"):
        text = Path("graphquant.toml").read_text().replace("out/digits_cnn", "fixed/digits_cnn")
        Path("graphquant.toml").write_text(text)
        result = run("-j", "2")
        assert result.returncode == 1, result.stderr
        failed = [one for one in told()["outcomes"] if one["status"] == "failed"]
        assert len(failed) == 6
        assert all("Read-only file system" in one["problem"]["message"] for one in failed)
    assert len(outputs()) == 6


def test_a_cache_that_is_full(here):
    """Models are made all the same, and it is said that they are not kept."""
    with mounted(here / "cache", "-o", "size=400k"):
        result = run("-j", "2")
        assert result.returncode == 0, result.stderr
        assert "The cache in cache takes no more: No space left on device" in result.stderr
    assert len(outputs()) == 12


def test_every_fault_at_once(here):
    """A model that hangs, one that crashes, one that eats memory, a corrupt one, a missing one: the rest finish."""
    Path("faults.py").write_text(
        "import os, time\n"
        "def hang():\n    time.sleep(1000)\n"
        "def crash():\n    os.abort()\n"
        "def eat():\n    held = []\n    while True:\n        held.append(bytearray(b'x' * (8 << 20)))\n"
    )
    Path("corrupt.onnx").write_bytes(Path("digits_cnn.onnx").read_bytes()[:20000])
    lines = [Path("graphquant.toml").read_text()]
    for fault in ("hang", "crash", "eat"):
        lines += ["[[model]]", "path = 'digits_cnn.onnx'", f"variant = '{fault}'", f"data = 'faults:{fault}'"]
        lines += [f"output = 'out/{fault}.onnx'"]
    lines += ["[[model]]", "path = 'corrupt.onnx'", "output = 'out/corrupt.onnx'", "data = 'digits_cnn_calib.npz'"]
    Path("graphquant.toml").write_text("\n".join(lines))
    result = run("-j", "2", "--timeout", "45", "--max-memory", "1GB")
    assert result.returncode == 1, result.stderr
    statuses = [one["status"] for one in told()["outcomes"]]
    assert statuses == ["done"] * 12 + ["timeout", "crashed", "memory", "failed"]
    hung, crashed, heavy = read_report(Path("report.json")).outcomes[-4:-1]
    assert [one.attempts for one in (hung, crashed, heavy)] == [1, 2, 2]
    assert hung.seconds >= 45
    assert "not done after 45 s" in hung.problem.message
    corrupt = told()["outcomes"][-1]["problem"]
    assert (corrupt["kind"], corrupt["exit_code"]) == ("ModelError", 3)
    assert "corrupt.onnx" in corrupt["message"]
    assert len(outputs()) == 12
