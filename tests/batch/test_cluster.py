"""A batch on a dask cluster: the same outputs and report as on this machine, whatever becomes of a worker."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from graphquant import api
from graphquant.batch import workers as processes
from graphquant.batch.manifest import load_entries
from graphquant.batch.run import BatchOptions, run_batch
from graphquant.batch.types import Gates, batch_report_json, read_report
from graphquant.batch.work import quantize_entry
from graphquant.calibration import load_stats
from graphquant.cli import main
from graphquant.errors import MissingDependencyError, UsageError

ROOT = Path(__file__).parent.parent.parent

MANIFEST = """
[defaults]
output = "out/{stem}.quant{suffix}"

[[model]]
path = ["digits_cnn.onnx", "digits_rnn.onnx", "digits_nested.onnx"]
data = "{stem}_calib.npz"
samples = 16

[[model]]
path = "digits_cnn_bn.onnx"
data = "random:5"
min_sqnr = 30
max_size = 1000

[[model]]
path = "digits_cnn.pb"
rules = "fixed_point"

[[model]]
path = "digits_rnn.onnx"
variant = "misfit"
data = "digits_cnn_calib.npz"
output = "out/never.onnx"

[[model]]
path = "broken.onnx"
"""


@pytest.fixture
def cluster(tmp_path):
    """Starts a cluster of so many workers, of one thread each; gives its address and all processes."""
    pytest.importorskip("distributed")
    started = []

    def start(workers):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        module, file = [sys.executable, "-m"], str(tmp_path / "scheduler.json")
        own = ["--scheduler-file", file, "--no-dashboard"]
        commands = [[*module, "distributed.cli.dask_scheduler", *own, "--host", "127.0.0.1", "--port", "0"]]
        commands += [[*module, "distributed.cli.dask_worker", *own, "--nthreads", "1"] for _ in range(workers)]
        for command in commands:
            with (tmp_path / f"log{len(started)}").open("wb") as log:
                started.append(
                    subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=log, start_new_session=True)
                )
        from distributed import Client

        with Client(scheduler_file=file, timeout="60s", set_as_default=False) as client:
            if workers:
                client.wait_for_workers(workers, timeout=60)
            return client.scheduler.address, started

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def batch(folder, execute):
    """Runs the manifest's batch in a folder of its own; gives the report without times, and the outputs' digests."""
    folder.mkdir()
    models = ROOT / "sample_models"
    wanted = ["digits_cnn.onnx", "digits_rnn.onnx", "digits_nested.onnx", "digits_cnn_bn.onnx"]
    wanted += ["digits_cnn.pb", *(path.name for path in models.glob("*_calib.npz"))]
    for name in wanted:
        shutil.copy(models / name, folder / name)
    folder.joinpath("broken.onnx").write_bytes(b"\x0a\x03abc")
    folder.joinpath("graphquant.toml").write_text(MANIFEST, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        report = run_batch(load_entries(), BatchOptions(folder=folder / "cache"), execute)
        return batch_report_json(report, times=False), digests(folder / "out")


def digests(folder):
    """The files of a folder with their digests."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def here(jobs):
    """Processes of this machine."""
    return partial(processes.run_workers, worker=partial(quantize_entry), limits=processes.WorkerLimits(jobs=jobs))


def there(address):
    """A cluster."""
    from graphquant.batch.cluster import run_on_cluster

    return partial(run_on_cluster, address, worker=partial(quantize_entry), limits=processes.WorkerLimits())


@pytest.mark.slow
def test_the_same_anywhere(tmp_path, monkeypatch, cluster):
    """One process, two, and two workers of a cluster give the same bytes and reports that differ in times alone."""
    address, _ = cluster(2)
    report, outputs = batch(tmp_path / "one", here(1))
    assert [one["status"] for one in report["outcomes"]] == ["done", "done", "done", "gate", "done", "failed", "failed"]
    assert len(outputs) == 5
    assert batch(tmp_path / "two", here(2)) == (report, outputs)
    assert batch(tmp_path / "cluster", there(address)) == (report, outputs)
    monkeypatch.chdir(tmp_path / "cluster")
    Path("out/digits_rnn.quant.onnx").unlink()
    words = ["batch", "--scheduler", address, "--cache-dir", "cache", "--no-cache", "--report", "report.json"]
    assert CliRunner().invoke(main, words).exit_code == 1
    assert [one.status for one in read_report(Path("report.json")).outcomes] == [
        one["status"] for one in report["outcomes"]
    ]
    assert digests(Path("out")) == outputs


@pytest.mark.slow
def test_a_killed_worker(tmp_path, monkeypatch, cluster):
    """What a worker was at when it was killed is done by the other, with the same result."""
    from distributed import Client

    address, _ = cluster(2)
    shutil.copy(ROOT / "sample_models" / "digits_cnn.onnx", tmp_path / "a.onnx")
    for name in "bcdef":
        shutil.copy(tmp_path / "a.onnx", tmp_path / f"{name}.onnx")
    monkeypatch.chdir(tmp_path)
    asked = load_entries(["*.onnx"], {"data": "random:64", "output": "out/{name}"})
    going = there(address)(asked)
    first = next(going)
    with Client(address, set_as_default=False) as client:
        busy = max(client.processing().items(), key=lambda item: len(item[1]))
        assert busy[1]
        os.killpg(client.run(os.getppid)[busy[0]], signal.SIGKILL)
    found = [first, *going]
    assert {one.name: one.status for one in found} == dict.fromkeys([f"{name}.onnx" for name in "abcdef"], "done")
    assert len(set(digests(tmp_path / "out").values())) == 1
    api.insert(tmp_path / "a.onnx", data="random:64").save(tmp_path / "plain.onnx")
    assert hashlib.sha256((tmp_path / "plain.onnx").read_bytes()).hexdigest() in digests(tmp_path / "out").values()


def compensating(folder):
    """Writes rules whose weights have 4 bits and are corrected; gives their path."""
    text = ROOT.joinpath("rules", "onnxruntime.toml").read_text("utf-8")
    text = text.replace('weight]\ndtype = "int8"', 'weight]\ndtype = "int4"')
    text = text.replace("bias-correction", "gptq")
    folder.joinpath("four.toml").write_text(text, "utf-8")
    return str(folder / "four.toml")


@pytest.mark.slow
@pytest.mark.parametrize("gates", [Gates(), Gates(min_sqnr=30)])
def test_calibration_is_sharded_for_few_models(tmp_path, monkeypatch, cluster, gates):
    """With more threads than models the samples are dealt out; the output is the one of a single process."""
    address, _ = cluster(2)
    for name in ("digits_cnn.onnx", "digits_cnn_calib.npz"):
        shutil.copy(ROOT / "sample_models" / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    (asked,) = load_entries(["digits_cnn.onnx"], {"data": "digits_cnn_calib.npz", "method": "percentile"})
    asked = replace(asked, gates=gates, rules=(compensating(tmp_path),))
    (found,) = there(address)([asked])
    assert (found.status, found.problem) == ("done", None)
    (alone,) = here(1)([replace(asked, output="alone.onnx")])
    times = {"output": "", "seconds": 0.0, "products": {}}
    assert replace(found, **times) == replace(alone, **times)
    assert Path(found.output).read_bytes() == Path("alone.onnx").read_bytes()


def test_shard_statistics_merge_exactly(tmp_path, monkeypatch):
    """The statistics of parts, merged, are those of all samples; a part that fails leaves the model to one worker."""
    pytest.importorskip("distributed")
    from graphquant.batch.cluster import _merge_shard_stats, _write_shard_stats

    shutil.copy(ROOT / "sample_models" / "digits_cnn.onnx", tmp_path / "a.onnx")
    shutil.copy(ROOT / "sample_models" / "digits_cnn_calib.npz", tmp_path / "a.npz")
    monkeypatch.chdir(tmp_path)
    (asked,) = load_entries(["a.onnx"], {"data": "a.npz", "samples": 40, "method": "percentile"})
    asked = replace(asked, rules=(compensating(tmp_path),))
    done = [_write_shard_stats(replace(asked, output=f"{number}.gqs"), shard=(number, 3)) for number in (1, 2, 3)]
    assert [one.status for one in done] == ["done"] * 3
    parts = [load_stats(Path(one.output)) for one in done]
    whole = _merge_shard_stats(parts)
    assert whole.samples == 32  # the rest is for the check
    source = api.load(tmp_path / "a.onnx")
    given = {"data": str(tmp_path / "a.npz"), "samples": 40, "method": "percentile", "rules": asked.rules}
    result = api.insert(source, **given)
    assert any(one.applied for one in result.algorithm_results)
    assert whole.sketches.keys() == result.stats.sketches.keys()
    result.save(tmp_path / "one.onnx")
    again = api.insert(source, stats=whole, **given)
    assert again.validation == result.validation
    again.save(tmp_path / "parts.onnx")
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "parts.onnx").read_bytes()
    assert _write_shard_stats(replace(asked, data="b.npz"), shard=(1, 3)).status == "failed"
    assert _merge_shard_stats([*parts[:2], None]) is None


def test_no_dask(monkeypatch):
    """Without dask.distributed it is said what to install."""
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.delitem(sys.modules, "graphquant.batch.cluster", raising=False)
    with pytest.raises(MissingDependencyError, match=r"pip install 'graphquant\[dask\]'"):
        import graphquant.batch.cluster  # noqa: F401  # that it cannot be is what is tested


def test_no_scheduler(tmp_path, monkeypatch):
    """Where nobody answers, the address is told; so is an address that is none."""
    pytest.importorskip("distributed")
    from graphquant.batch import cluster

    monkeypatch.setattr(cluster, "SCHEDULER_TIMEOUT", "0.5s")
    (tmp_path / "a.onnx").touch()
    asked = load_entries([str(tmp_path / "a.onnx")])
    for address in ("tcp://127.0.0.1:9", "nothing://here"):
        with pytest.raises(UsageError, match=f"There is no dask scheduler at {address}"):
            list(there(address)(asked))
    assert list(there("tcp://127.0.0.1:9")([])) == []


@pytest.mark.slow
def test_shards_obey_the_limits(tmp_path, monkeypatch, cluster):
    """Data that ends or outlasts the process that reads it ends none of dask's workers, in parts or in one piece."""
    from distributed import Client

    from graphquant.batch.cluster import run_on_cluster

    address, _ = cluster(2)
    shutil.copy(ROOT / "sample_models" / "digits_cnn.onnx", tmp_path / "a.onnx")
    tmp_path.joinpath("faults.py").write_text(
        "import os, time\ndef leave():\n    os._exit(7)\ndef wait():\n    time.sleep(600)\n", "utf-8"
    )
    monkeypatch.chdir(tmp_path)
    with Client(address, set_as_default=False) as client:
        before = client.run(os.getpid)
        limits = processes.WorkerLimits(timeout=5, retries=0)
        for fault, status in (("leave", "crashed"), ("wait", "timeout")):
            asked = load_entries(["a.onnx"], {"data": f"faults:{fault}", "output": "never.onnx"})
            assert [one.status for one in run_on_cluster(address, asked, partial(quantize_entry), limits)] == [status]
        assert client.run(os.getpid) == before


@pytest.mark.slow
def test_stopping_ends_running_work(tmp_path, monkeypatch, cluster):
    """Whoever leaves early leaves no process on a cluster at a model, and another batch has its workers."""
    address, _ = cluster(1)
    for name in ("digits_cnn.onnx", "digits_cnn_calib.npz"):
        shutil.copy(ROOT / "sample_models" / name, tmp_path)
    tmp_path.joinpath("faults.py").write_text(
        "import os, time\ndef wait():\n    open(f'started-{os.getpid()}', 'w').close()\n    time.sleep(60)\n",
        "utf-8",
    )
    monkeypatch.chdir(tmp_path)
    quick = replace(*load_entries(["digits_cnn.onnx"], {"rules": ("weight_only",)}), name="quick")
    asked = [quick, replace(quick, name="wait", output="wait.onnx", rules=(), data="faults:wait")]
    going = there(address)(asked)
    assert next(going).name == "quick"
    while not (started := list(tmp_path.glob("started-*"))):
        time.sleep(0.05)
    going.close()
    assert processes.process_memory(int(started[0].name.rpartition("-")[2])) == 0
    assert [one.status for one in there(address)([quick])] == ["done"]


@pytest.mark.slow
def test_losing_the_scheduler(tmp_path, monkeypatch, cluster):
    """A scheduler that does not come back ends the batch with a word; what was finished is kept."""
    from graphquant.batch import cluster as module

    monkeypatch.setattr(module, "SCHEDULER_TIMEOUT", "5s")
    monkeypatch.chdir(tmp_path)
    address, started = cluster(1)
    shutil.copy(ROOT / "sample_models" / "digits_cnn.onnx", tmp_path / "a.onnx")
    for name in "bcd":
        shutil.copy(tmp_path / "a.onnx", tmp_path / f"{name}.onnx")
    asked = load_entries(["*.onnx"], {"rules": ("weight_only",), "output": "out/{name}"})

    def execute(todo):
        for outcome in there(address)(todo):
            yield outcome
            started[0].kill()

    with pytest.raises(UsageError, match="The cluster's scheduler is gone"):
        run_batch(asked, BatchOptions(folder=tmp_path / "cache"), execute)
    report = run_batch(asked, BatchOptions(folder=tmp_path / "cache", resume=True), here(1))
    assert [one.status for one in report.outcomes] == ["done"] * 4


@pytest.mark.slow
def test_no_workers(tmp_path, cluster):
    """A cluster without workers would wait for ever; it is told instead."""
    address, _ = cluster(0)
    (tmp_path / "a.onnx").touch()
    with pytest.raises(UsageError, match=f"The cluster at {address} has no workers"):
        list(there(address)(load_entries([str(tmp_path / "a.onnx")])))
