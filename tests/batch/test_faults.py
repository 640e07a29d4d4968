"""Faults around a batch: it is killed, the disk is full, a folder is read-only."""

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.batch_reports import read_outputs, report_without_times

from graphquant.batch.types import read_report

pytestmark = pytest.mark.slow  # each starts the program and its workers

KILLS = 9

GATED = """
import time
from pathlib import Path
import numpy as np

def __getattr__(name):
    def samples():
        Path(f"begun-{name}").touch()
        while not Path(f"permit-{name}").exists():
            time.sleep(0.01)
        with np.load(name.rpartition("_")[0] + "_calib.npz") as arrays:
            key = next(key for key in arrays if key != "labels")
            for sample in arrays[key][:8]:
                yield {key: sample[None]}
    return samples
"""
"""Data that is read only after a permit, so that no entry is finished earlier, however fast the machine is."""


def batch_command(*arguments):
    """Return the command line of a batch with arguments."""
    return [
        sys.executable,
        "-m",
        "graphquant",
        "batch",
        "--allow-code",
        "--cache-dir",
        "cache",
        "--report",
        "report.json",
        *arguments,
    ]


def finish_batch(*arguments):
    """Run a batch to its end."""
    return subprocess.run(batch_command(*arguments), capture_output=True, text=True, check=False)


def read_json_report():
    """Return the report without times."""
    return report_without_times(read_report(Path("report.json")))


@contextmanager
def mount_tmpfs(folder, *options):
    """Mount a small file system at `folder`. Skip the test if mounting is not permitted."""
    folder.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mount = subprocess.run(["mount", "-t", "tmpfs", *options, "none", folder], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("mounting is not permitted")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def batch_of_twelve(tmp_path, samples, monkeypatch):
    """Return a folder with a manifest of twelve entries for two models."""
    lines = ["[defaults]", "samples = 2"]
    for stem in ("digits_cnn", "digits_rnn"):
        shutil.copy(samples / f"{stem}.onnx", tmp_path)
        shutil.copy(samples / f"{stem}_calib.npz", tmp_path)
        for number in range(6):
            lines += ["[[model]]", f"path = '{stem}.onnx'", f"variant = 'v{number}'", f"data = '{stem}_calib.npz'"]
            lines += [f"output = 'out/{stem}_{number}.onnx'", f"samples = {number + 1}"]
    tmp_path.joinpath("graphquant.toml").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def journal_names():
    """Return the names in the journal, in order, without a truncated last line."""
    lines = [line for path in Path("cache/batches").glob("*.jsonl") for line in path.read_bytes().split(b"\n")[:-1]]
    return [json.loads(line)["name"] for line in lines]


def _run_and_kill(finished, kind, moment, *arguments):
    """Run the batch and kill it while an entry waits, while one is quantized, or after one more is finished."""
    for path in Path().glob("begun-*"):
        path.unlink()
    process = subprocess.Popen(
        batch_command("-j", "2", "--no-cache", *arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    waiting = set()
    while not waiting and process.poll() is None:
        time.sleep(0.01)
        begun, permitted = (
            {path.name.partition("-")[2] for path in Path().glob(f"{state}-*")} for state in ("begun", "permit")
        )
        waiting = begun - permitted
    if kind != "waiting":
        Path(f"permit-{min(waiting)}").touch()
    while kind == "finished" and len(journal_names()) <= finished:
        time.sleep(0.01)
    time.sleep(moment)
    process.kill()
    process.wait()


def test_resume_after_kills(batch_of_twelve):
    """A batch that is killed nine times resumes each time. No entry is done twice and no output is partial."""
    Path("gated.py").write_text(GATED)
    text = Path("graphquant.toml").read_text()
    names = re.findall(r"out/(\w+)\.onnx", text)
    for name in names:
        text = re.sub(rf"data = '[\w.]+'(\noutput = 'out/{name}\.onnx')", rf"data = 'gated:{name}'\1", text)
        Path(f"permit-{name}").touch()
    Path("graphquant.toml").write_text(text)
    assert finish_batch("-j", "2", "--no-cache").returncode == 0
    expected, report = read_outputs(), read_json_report()
    assert len(expected) == len(names) == 12
    shutil.rmtree("out")
    shutil.rmtree("cache")
    for name in names:
        Path(f"permit-{name}").unlink()
    rng = random.Random(7)  # noqa: S311  # not for cryptography
    finished, journal_lengths = [], set()
    for kill in range(KILLS):
        kind = ("waiting", "working", "finished")[kill % 3]
        moment = rng.uniform(0, 0.3) if kind == "working" else 0
        _run_and_kill(len(finished), kind, moment, *(["--resume"] if kill else []))
        journal = journal_names()
        assert journal[: len(finished)] == finished
        assert len(set(journal)) == len(journal)
        finished = journal
        journal_lengths.add(len(journal))
        for name, data in read_outputs().items():
            assert name.startswith(".") or data == expected[name]
    assert len(journal_lengths) > KILLS // 3
    for name in names:
        Path(f"permit-{name}").touch()
    final_run = finish_batch("-j", "2", "--no-cache", "--resume")
    assert final_run.returncode == 0
    assert read_outputs() == expected
    assert read_json_report() == report
    assert sorted(journal_names()) == sorted(outcome["name"] for outcome in report["outcomes"])
    assert finish_batch("-j", "2", "--no-cache", "--resume").returncode == 0
    assert len(journal_names()) == 12


def test_full_disk(batch_of_twelve):
    """Entries that do not fit on the disk fail without partial files. The other entries are done."""
    with mount_tmpfs(batch_of_twelve / "full", "-o", "size=48k"):
        text = Path("graphquant.toml").read_text().replace("out/digits_cnn", "full/digits_cnn")
        Path("graphquant.toml").write_text(text)
        result = finish_batch("-j", "2")
        assert result.returncode == 1, result.stderr
        statuses = {
            outcome["output"]: (outcome["status"], outcome["problem"]) for outcome in read_json_report()["outcomes"]
        }
        failed = {path: problem for path, (status, problem) in statuses.items() if status == "failed"}
        assert len(failed) == 5  # each takes 28 kB
        assert all(path.startswith("full/") for path in failed)
        assert {problem["kind"] for problem in failed.values()} == {"UsageError"}
        assert all(os.strerror(errno.ENOSPC) in problem["message"] for problem in failed.values())
        assert len(list(Path("full").iterdir())) == 1
    assert len(read_outputs()) == 6


def test_read_only_folder(batch_of_twelve):
    """Entries whose output folder is read-only fail. The other entries are done."""
    with mount_tmpfs(batch_of_twelve / "fixed", "-o", "ro"):
        text = Path("graphquant.toml").read_text().replace("out/digits_cnn", "fixed/digits_cnn")
        Path("graphquant.toml").write_text(text)
        result = finish_batch("-j", "2")
        assert result.returncode == 1, result.stderr
        failed = [outcome for outcome in read_json_report()["outcomes"] if outcome["status"] == "failed"]
        assert len(failed) == 6
        assert all("Read-only file system" in outcome["problem"]["message"] for outcome in failed)
    assert len(read_outputs()) == 6


def test_full_cache(batch_of_twelve):
    """All entries are done without the cache, with a warning."""
    with mount_tmpfs(batch_of_twelve / "cache", "-o", "size=400k"):
        result = finish_batch("-j", "2")
        assert result.returncode == 0, result.stderr
        assert re.search(rf" cache is full .*: {os.strerror(errno.ENOSPC)}", result.stderr)
    assert len(read_outputs()) == 12


def test_many_faults_in_one_batch(batch_of_twelve):
    """Entries that hang, crash, use too much memory or are corrupt do not affect the others."""
    assert finish_batch("-j", "2", "--report", "first.json").returncode == 0
    timeout = max(5, round(20 * max(outcome.seconds for outcome in read_report(Path("first.json")).outcomes)))
    shutil.rmtree("cache")
    shutil.rmtree("out")
    Path("faults.py").write_text(
        "import os, time\n"
        "def hang():\n    while True:\n        time.sleep(1)\n"
        "def crash():\n    os.abort()\n"
        "def eat():\n    blocks = []\n    while True:\n        blocks.append(bytearray(b'x' * (8 << 20)))\n"
    )
    Path("corrupt.onnx").write_bytes(Path("digits_cnn.onnx").read_bytes()[:20000])
    lines = [Path("graphquant.toml").read_text()]
    for fault in ("hang", "crash", "eat"):
        lines += ["[[model]]", "path = 'digits_cnn.onnx'", f"variant = '{fault}'", f"data = 'faults:{fault}'"]
        lines += [f"output = 'out/{fault}.onnx'"]
    lines += ["[[model]]", "path = 'corrupt.onnx'", "output = 'out/corrupt.onnx'", "data = 'digits_cnn_calib.npz'"]
    Path("graphquant.toml").write_text("\n".join(lines))
    result = finish_batch("-j", "2", "--timeout", str(timeout), "--max-memory", "1GB")
    assert result.returncode == 1, result.stderr
    statuses = [outcome["status"] for outcome in read_json_report()["outcomes"]]
    assert statuses == ["done"] * 12 + ["timeout", "crashed", "memory", "failed"]
    hung, crashed, heavy = read_report(Path("report.json")).outcomes[-4:-1]
    assert [outcome.attempts for outcome in (hung, crashed, heavy)] == [1, 2, 2]
    assert hung.seconds >= timeout
    assert hung.problem.kind == "Timeout"
    assert f"after {timeout} s" in hung.problem.message
    corrupt = read_json_report()["outcomes"][-1]["problem"]
    assert (corrupt["kind"], corrupt["exit_code"]) == ("ModelError", 3)
    assert "corrupt.onnx" in corrupt["message"]
    assert len(read_outputs()) == 12
