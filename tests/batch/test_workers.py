"""Worker processes: what ends one of them is told of its model, and the others go on."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from graphquant.batch import workers
from graphquant.batch.types import Entry
from graphquant.batch.work import quantize_entry
from graphquant.batch.workers import WorkerLimits, process_memory, run_workers
from graphquant.errors import UsageError

pytestmark = pytest.mark.slow  # a worker takes a second or more to start

FAULTS = """
import ctypes, os, sys, time

def leave():
    print("so long", file=sys.stderr)
    os._exit(7)

def fault():
    ctypes.string_at(0)

def eat():
    held = []
    while True:
        held.append(bytearray(b"x" * (8 << 20)))

def once():
    if not os.path.exists("tried"):
        open("tried", "w").close()
        os._exit(1)
    import numpy
    data = numpy.load("digits_cnn_calib.npz")
    return [{name: data[name][:1] for name in data.files}]

def fork():
    if not os.fork():
        time.sleep(60)
    os._exit(9)

def wait():
    open(f"started-{os.getpid()}", "w").close()
    time.sleep(600)
"""


@pytest.fixture
def here(tmp_path, samples, monkeypatch):
    """A folder with a model, its data, and functions for data that go wrong."""
    for name in ("digits_cnn.onnx", "digits_cnn_calib.npz"):
        shutil.copy(samples / name, tmp_path)
    tmp_path.joinpath("faults.py").write_text(FAULTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def entry(name, data="digits_cnn_calib.npz"):
    """The model with some data."""
    return Entry(name=name, model="digits_cnn.onnx", output=f"{name}.onnx", data=data)


def outcomes(entries, **limits):
    """What becomes of them, by name."""
    return {
        one.name: one
        for one in run_workers(entries, partial(quantize_entry, max_memory=1 << 28), WorkerLimits(**limits))
    }


def test_a_dying_worker_does_not_affect_others(here):
    """A worker that leaves, one that faults and one that eats memory: each is told, and the other models are done."""
    faulty = ("leave", "fault", "eat")
    entries = [entry(name, f"faults:{name}") for name in faulty] + [entry("a"), entry("b")]
    found = outcomes(entries, jobs=2, memory=1 << 30)
    assert {name: one.status for name, one in found.items()} == {
        "leave": "crashed",
        "fault": "crashed",
        "eat": "memory",
        "a": "done",
        "b": "done",
    }
    assert [found[name].attempts for name in (*faulty, "a", "b")] == [2, 2, 2, 1, 1]
    assert "exit code 7. Its last output: so long" in found["leave"].problem.message
    assert "was ended by SIGSEGV" in found["fault"].problem.message
    assert "more than 1024 MiB" in found["eat"].problem.message
    assert Path("a.onnx").read_bytes() == Path("b.onnx").read_bytes()
    assert sorted(path.name for path in here.glob("*.onnx")) == ["a.onnx", "b.onnx", "digits_cnn.onnx"]


def test_a_dead_worker_with_a_child(here):
    """What a worker forked and left behind does not hide that it is dead."""
    begun = time.monotonic()
    found = outcomes([entry("fork", "faults:fork")], retries=0)
    assert found["fork"].status == "crashed"
    assert "exit code 9" in found["fork"].problem.message
    assert time.monotonic() - begun < 50


def test_unmeasurable_memory(monkeypatch):
    """A limit that would not hold is refused."""
    monkeypatch.setattr(workers, "process_memory", lambda _process: 0)
    assert WorkerLimits(jobs=2).memory is None
    with pytest.raises(UsageError, match="--max-memory"):
        WorkerLimits(memory=1 << 30)


def test_retries(here):
    """What goes well the second time is done; without retries it is not."""
    found = outcomes([entry("once", "faults:once")])
    assert (found["once"].status, found["once"].attempts) == ("done", 2)
    Path("tried").unlink()
    found = outcomes([entry("once", "faults:once")], retries=0)
    assert (found["once"].status, found["once"].attempts) == ("crashed", 1)


def test_progress_and_warm_workers(here):
    """Each model is told when it begins and how far it is; one worker does all of them."""
    told = []
    entries = [entry(name) for name in "abc"]
    done = list(
        run_workers(
            entries, quantize_entry, WorkerLimits(), lambda one, what, at, of: told.append((one.name, what, at, of))
        )
    )
    assert [one.name for one in done] == ["a", "b", "c"]
    assert [each for each in told if not each[1]] == [(name, "", 0, 0) for name in "abc"]
    assert ("a", "calibrating", 80, 80) in told
    assert done[1].seconds < done[0].seconds + 5


def test_leaving_early_ends_the_workers(here):
    """Nothing is left of them, and none goes on."""
    going = run_workers([entry("a"), entry("wait", "faults:wait")], quantize_entry, WorkerLimits(jobs=2))
    assert next(going).name == "a"
    while not (started := list(here.glob("started-*"))):
        time.sleep(0.05)
    going.close()
    process = int(started[0].name.rpartition("-")[2])
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c(here, sent):
    """It ends the batch and its workers with 130; what was done is kept and told, and --resume does the rest."""
    Path("graphquant.toml").write_text(
        "[[model]]\npath = 'digits_cnn.onnx'\nvariant = 'a'\noutput = 'a.onnx'\ndata = 'digits_cnn_calib.npz'\n"
        "[[model]]\npath = 'digits_cnn.onnx'\nvariant = 'b'\noutput = 'b.onnx'\ndata = 'faults:wait'\n"
    )
    command = [sys.executable, "-m", "graphquant", "batch", "--cache-dir", "cache", "-j", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        guard = threading.Timer(120, process.kill)
        guard.start()
        while not (started := list(here.glob("started-*"))) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(sent)
        out, err = process.communicate()
        guard.cancel()
    assert process.returncode == 130, err
    assert "1 done" in out
    assert "--resume" in err
    assert process_memory(int(started[0].name.rpartition("-")[2])) == 0
    assert Path("a.onnx").exists()
    Path("faults.py").write_text("def wait():\n    return []\n")
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "1 done, 1 failed" in again.stdout
    assert "a.onnx" not in again.stderr
