"""Worker processes: a fault ends one worker and is reported for its model, and the others go on."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest
from support.onnx_models import save_outlier_net

from graphquant.batch import workers
from graphquant.batch.types import Entry, Gates
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
    blocks = []
    while True:
        blocks.append(bytearray(b"x" * (8 << 20)))

def once():
    if not os.path.exists("tried"):
        open("tried", "w").close()
        os._exit(1)
    import numpy
    data = numpy.load("digits_cnn_calib.npz")
    return [{name: data[name][:1] for name in data.files}]

def fork():
    if not os.fork():
        while not os.path.exists("end"):
            time.sleep(0.05)
        os._exit(0)
    os._exit(9)

def wait():
    open(f"started-{os.getpid()}", "w").close()
    time.sleep(600)
"""


@pytest.fixture
def faulty_folder(tmp_path, samples, monkeypatch):
    """Return a folder with a model, its data, and data functions with faults."""
    for name in ("digits_cnn.onnx", "digits_cnn_calib.npz"):
        shutil.copy(samples / name, tmp_path)
    tmp_path.joinpath("faults.py").write_text(FAULTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_entry(name, data="digits_cnn_calib.npz"):
    """Return an entry of the model with some data."""
    return Entry(name=name, model="digits_cnn.onnx", output=f"{name}.onnx", data=data)


def run_and_collect(entries, **limits):
    """Return the outcomes of entries by name."""
    return {
        outcome.name: outcome
        for outcome in run_workers(entries, partial(quantize_entry, max_memory=1 << 28), WorkerLimits(**limits))
    }


def test_dying_workers_do_not_affect_others(faulty_folder):
    """Entries that exit, fault or use too much memory are reported, and the others are done."""
    faulty = ("leave", "fault", "eat")
    entries = [make_entry(name, f"faults:{name}") for name in faulty] + [make_entry("a"), make_entry("b")]
    outcomes = run_and_collect(entries, jobs=2, memory=1 << 30)
    assert {name: outcome.status for name, outcome in outcomes.items()} == {
        "leave": "crashed",
        "fault": "crashed",
        "eat": "memory",
        "a": "done",
        "b": "done",
    }
    assert [outcomes[name].attempts for name in (*faulty, "a", "b")] == [2, 2, 2, 1, 1]
    assert re.search(r"exit code 7\. .*: so long", outcomes["leave"].problem.message)
    assert "was ended by SIGSEGV" in outcomes["fault"].problem.message
    assert "more than 1024 MiB" in outcomes["eat"].problem.message
    assert Path("a.onnx").read_bytes() == Path("b.onnx").read_bytes()
    assert sorted(path.name for path in faulty_folder.glob("*.onnx")) == ["a.onnx", "b.onnx", "digits_cnn.onnx"]


def test_dead_worker_with_a_child(faulty_folder):
    """A child process of a dead worker does not hide its death."""
    try:
        outcomes = run_and_collect([make_entry("fork", "faults:fork")], retries=0)  # the child waits for the file
    finally:
        Path("end").touch()
    assert outcomes["fork"].status == "crashed"
    assert "exit code 9" in outcomes["fork"].problem.message


def test_unmeasurable_memory(monkeypatch):
    """A memory limit raises UsageError if memory cannot be measured."""
    monkeypatch.setattr(workers, "process_memory", lambda _process: 0)
    assert WorkerLimits(jobs=2).memory is None
    with pytest.raises(UsageError, match="--max-memory"):
        WorkerLimits(memory=1 << 30)


def test_retries(faulty_folder):
    """An entry that succeeds at the second attempt is done. Without retries it crashed."""
    outcomes = run_and_collect([make_entry("once", "faults:once")])
    assert (outcomes["once"].status, outcomes["once"].attempts) == ("done", 2)
    Path("tried").unlink()
    outcomes = run_and_collect([make_entry("once", "faults:once")], retries=0)
    assert (outcomes["once"].status, outcomes["once"].attempts) == ("crashed", 1)


def test_searches_do_not_depend_on_the_number_of_workers(faulty_folder, samples):
    """A search for a bound and a repair produce the same bytes in one worker and in two."""
    save_outlier_net(faulty_folder)
    for name in ("digits_rnn.onnx", "digits_rnn_calib.npz"):
        shutil.copy(samples / name, faulty_folder)
    outputs = []
    for jobs in (1, 2):
        entries = [
            Entry(
                name=stem,
                model=f"{stem}.onnx",
                data="data.npz" if stem == "net" else f"{stem}_calib.npz",
                output=f"{jobs}/{stem}.onnx",
                gates=Gates(min_sqnr=bound),
            )
            for stem, bound in (("digits_cnn", 60.0), ("digits_rnn", 60.0), ("net", None))
        ]
        outcomes = run_and_collect(entries, jobs=jobs)
        assert {outcome.status for outcome in outcomes.values()} <= {"done", "gate"}
        outputs.append([Path(entry.output).read_bytes() for entry in entries])
    assert outputs[0] == outputs[1]
    plain = Entry(name="plain", model="net.onnx", data="data.npz", output="plain.onnx", gates=Gates(min_sqnr="none"))
    run_and_collect([plain], jobs=1)
    assert Path("plain.onnx").read_bytes() != outputs[0][2]


def test_progress_and_warm_workers(faulty_folder):
    """The callback gets the start and the progress of each model. One worker runs all of them."""
    events = []
    entries = [make_entry(name) for name in "abc"]
    results = list(
        run_workers(
            entries,
            quantize_entry,
            WorkerLimits(),
            lambda entry, stage, step, total: events.append((entry.name, stage, step, total)),
        )
    )
    assert [outcome.name for outcome in results] == ["a", "b", "c"]
    assert [event for event in events if not event[1]] == [(name, "", 0, 0) for name in "abc"]
    assert ("a", "calibrating", 80, 80) in events
    assert results[1].seconds < results[0].seconds + 5


def test_closing_the_iterator_ends_the_workers(faulty_folder):
    """Closing the iterator ends all worker processes."""
    results = run_workers([make_entry("a"), make_entry("wait", "faults:wait")], quantize_entry, WorkerLimits(jobs=2))
    assert next(results).name == "a"
    while not (started := list(faulty_folder.glob("started-*"))):
        time.sleep(0.05)
    results.close()
    process = int(started[0].name.rpartition("-")[2])
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_interrupt_while_a_worker_starts(faulty_folder, monkeypatch):
    """Ctrl-C is blocked while a worker starts, which ignores it soon after, and no longer in the parent."""
    masks, start = [], SpawnProcess.start

    def record(process: SpawnProcess) -> None:
        start(process)
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    monkeypatch.setattr(SpawnProcess, "start", record)
    next(run_workers([make_entry("a")], quantize_entry, WorkerLimits(jobs=1)))
    assert [signal.SIGINT in mask for mask in masks] == [True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_the_batch(faulty_folder, number):
    """A signal ends batch and workers with exit code 130. --resume continues after finished entries."""
    Path("graphquant.toml").write_text(
        "[[model]]\npath = 'digits_cnn.onnx'\nvariant = 'a'\noutput = 'a.onnx'\ndata = 'digits_cnn_calib.npz'\n"
        "[[model]]\npath = 'digits_cnn.onnx'\nvariant = 'b'\noutput = 'b.onnx'\ndata = 'faults:wait'\n"
    )
    command = [sys.executable, "-m", "graphquant", "batch", "--cache-dir", "cache", "-j", "1", "--allow-code"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(120, process.kill)
        watchdog.start()
        while not (started := list(faulty_folder.glob("started-*"))) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate()
        watchdog.cancel()
    assert process.returncode == 130, err
    assert "1 done" in out
    assert "--resume" in err
    assert process_memory(int(started[0].name.rpartition("-")[2])) == 0
    assert Path("a.onnx").exists()
    Path("faults.py").write_text("def wait():\n    return []\n")
    resumed = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False)
    assert resumed.returncode == 1
    assert "1 done, 1 failed" in resumed.stdout
    assert "a.onnx" not in resumed.stderr
