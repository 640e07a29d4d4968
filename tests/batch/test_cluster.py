"""Batches on a dask cluster: outputs and report are the same as on one machine, also if workers die."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.batch_reports import report_without_times
from support.cli import run_cli

import graphquant as gq
from graphquant.batch import workers as processes
from graphquant.batch.manifest import load_entries
from graphquant.batch.run import BatchOptions, run_batch
from graphquant.batch.types import Gates, read_report
from graphquant.batch.work import quantize_entry
from graphquant.calibration.stats import load_stats
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
exclude = ["/./"]
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
    """Return a function that starts a cluster of one-thread workers, and returns its address and processes."""
    pytest.importorskip("distributed")
    processes_started = []

    def start(workers):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        module, file = [sys.executable, "-m"], str(tmp_path / "scheduler.json")
        cluster_options = ["--scheduler-file", file, "--no-dashboard"]
        commands = [[*module, "distributed.cli.dask_scheduler", *cluster_options, "--host", "127.0.0.1", "--port", "0"]]
        commands += [
            [*module, "distributed.cli.dask_worker", *cluster_options, "--nthreads", "1"] for _ in range(workers)
        ]
        for command in commands:
            with (tmp_path / f"log{len(processes_started)}").open("wb") as log:
                processes_started.append(
                    subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=log, start_new_session=True)
                )
        from distributed import Client

        with Client(scheduler_file=file, timeout="60s", set_as_default=False) as client:
            if workers:
                client.wait_for_workers(workers, timeout=60)
            return client.scheduler.address, processes_started

    yield start
    for process in processes_started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_sample_batch(folder, execute):
    """Run the manifest in a new folder. Return the report without times and the digests of the outputs."""
    folder.mkdir()
    models = ROOT / "sample_models"
    names = ["digits_cnn.onnx", "digits_rnn.onnx", "digits_nested.onnx", "digits_cnn_bn.onnx"]
    names += ["digits_cnn.pb", *(path.name for path in models.glob("*_calib.npz"))]
    for name in names:
        shutil.copy(models / name, folder / name)
    folder.joinpath("broken.onnx").write_bytes(b"\x0a\x03abc")
    folder.joinpath("graphquant.toml").write_text(MANIFEST, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        report = run_batch(load_entries(), BatchOptions(folder=folder / "cache"), execute)
        return report_without_times(report), file_digests(folder / "out")


def file_digests(folder):
    """Return the digest of each file in a folder, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def local_executor(jobs):
    """Return an executor of processes on this machine."""
    return partial(processes.run_workers, worker=partial(quantize_entry), limits=processes.WorkerLimits(jobs=jobs))


def cluster_executor(address):
    """Return an executor on a cluster."""
    from graphquant.batch.cluster import run_on_cluster

    return partial(run_on_cluster, address, worker=partial(quantize_entry), limits=processes.WorkerLimits())


@pytest.mark.slow
def test_results_do_not_depend_on_the_executor(tmp_path, monkeypatch, cluster):
    """One process, two processes and a cluster produce the same bytes, and reports that differ only in times."""
    address, _ = cluster(2)
    report, outputs = run_sample_batch(tmp_path / "one", local_executor(1))
    assert [outcome["status"] for outcome in report["outcomes"]] == [
        "done",
        "done",
        "done",
        "empty",
        "done",
        "failed",
        "failed",
    ]
    assert len(outputs) == 4
    assert run_sample_batch(tmp_path / "two", local_executor(2)) == (report, outputs)
    assert run_sample_batch(tmp_path / "cluster", cluster_executor(address)) == (report, outputs)
    monkeypatch.chdir(tmp_path / "cluster")
    Path("out/digits_rnn.quant.onnx").unlink()
    arguments = ["batch", "--scheduler", address, "--cache-dir", "cache", "--no-cache", "--report", "report.json"]
    run_cli(*arguments, code=1)
    assert [outcome.status for outcome in read_report(Path("report.json")).outcomes] == [
        outcome["status"] for outcome in report["outcomes"]
    ]
    assert file_digests(Path("out")) == outputs


@pytest.mark.slow
def test_killed_worker_is_replaced(tmp_path, monkeypatch, cluster):
    """Another worker takes over the entries of a killed worker, with the same result."""
    from distributed import Client

    address, _ = cluster(2)
    shutil.copy(ROOT / "sample_models" / "digits_cnn.onnx", tmp_path / "a.onnx")
    for name in "bcdef":
        shutil.copy(tmp_path / "a.onnx", tmp_path / f"{name}.onnx")
    monkeypatch.chdir(tmp_path)
    entries = load_entries(["*.onnx"], {"data": "random:64", "output": "out/{name}"})
    running = cluster_executor(address)(entries)
    first = next(running)
    with Client(address, set_as_default=False) as client:
        busy = max(client.processing().items(), key=lambda item: len(item[1]))
        assert busy[1]
        os.killpg(client.run(os.getppid)[busy[0]], signal.SIGKILL)
    results = [first, *running]
    assert {outcome.name: outcome.status for outcome in results} == dict.fromkeys(
        [f"{name}.onnx" for name in "abcdef"], "done"
    )
    assert len(set(file_digests(tmp_path / "out").values())) == 1
    gq.insert(tmp_path / "a.onnx", data="random:64").save(tmp_path / "plain.onnx")
    assert hashlib.sha256((tmp_path / "plain.onnx").read_bytes()).hexdigest() in file_digests(tmp_path / "out").values()


def write_int4_gptq_rules(folder):
    """Write rules with int4 weights and GPTQ, and return their path."""
    text = ROOT.joinpath("rules", "onnxruntime.toml").read_text("utf-8")
    text = text.replace('weight]\ndtype = "int8"', 'weight]\ndtype = "int4"')
    text = text.replace("bias-correction", "gptq")
    folder.joinpath("four.toml").write_text(text, "utf-8")
    return str(folder / "four.toml")


@pytest.mark.slow
@pytest.mark.parametrize("gates", [Gates(), Gates(min_sqnr=30)])
def test_calibration_is_sharded_for_few_models(tmp_path, monkeypatch, cluster, gates):
    """With more threads than models the samples are sharded. The output equals that of a single process."""
    address, _ = cluster(2)
    for name in ("digits_cnn.onnx", "digits_cnn_calib.npz"):
        shutil.copy(ROOT / "sample_models" / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    (entry,) = load_entries(["digits_cnn.onnx"], {"data": "digits_cnn_calib.npz", "method": "percentile"})
    entry = replace(entry, gates=gates, rules=(write_int4_gptq_rules(tmp_path),))
    (sharded,) = cluster_executor(address)([entry])
    assert (sharded.status, sharded.problem) == ("done", None)
    (local,) = local_executor(1)([replace(entry, output="alone.onnx")])
    run_specific = {"output": "", "seconds": 0.0, "products": {}}
    assert replace(sharded, **run_specific) == replace(local, **run_specific)
    assert Path(sharded.output).read_bytes() == Path("alone.onnx").read_bytes()


@pytest.mark.slow
def test_shard_statistics_merge_exactly(tmp_path, monkeypatch):
    """Merged statistics of shards equal those of all samples. If a shard fails there is no merged result."""
    pytest.importorskip("distributed")
    from graphquant.batch.cluster import _merge_shard_stats, _write_shard_stats

    shutil.copy(ROOT / "sample_models" / "digits_cnn.onnx", tmp_path / "a.onnx")
    shutil.copy(ROOT / "sample_models" / "digits_cnn_calib.npz", tmp_path / "a.npz")
    monkeypatch.chdir(tmp_path)
    (entry,) = load_entries(["a.onnx"], {"data": "a.npz", "samples": 40, "method": "percentile"})
    entry = replace(entry, rules=(write_int4_gptq_rules(tmp_path),))
    shard_outcomes = [
        _write_shard_stats(replace(entry, output=f"{number}.gqs"), shard=(number, 3)) for number in (1, 2, 3)
    ]
    assert [outcome.status for outcome in shard_outcomes] == ["done"] * 3
    shard_stats = [load_stats(Path(outcome.output)) for outcome in shard_outcomes]
    merged = _merge_shard_stats(shard_stats)
    assert merged.samples == 32  # the other samples are held out for validation
    source = gq.load(tmp_path / "a.onnx")
    options = {"data": str(tmp_path / "a.npz"), "samples": 40, "method": "percentile", "rules": entry.rules}
    result = gq.insert(source, **options)
    assert any(outcome.applied for outcome in result.algorithm_results)
    assert merged.sketches.keys() == result.stats.sketches.keys()
    result.save(tmp_path / "one.onnx")
    from_merged = gq.insert(source, stats=merged, **options)
    assert from_merged.validation == result.validation
    from_merged.save(tmp_path / "parts.onnx")
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "parts.onnx").read_bytes()
    assert _write_shard_stats(replace(entry, data="b.npz"), shard=(1, 3)).status == "failed"
    assert _merge_shard_stats([*shard_stats[:2], None]) is None


def test_missing_dask(monkeypatch):
    """Without dask.distributed the import fails with the command that installs it."""
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.delitem(sys.modules, "graphquant.batch.cluster", raising=False)
    with pytest.raises(MissingDependencyError, match=r"pip install 'graphquant\[dask\]'"):
        import graphquant.batch.cluster  # noqa: F401  # the import must fail


def test_unreachable_scheduler(tmp_path, monkeypatch):
    """An address without a scheduler, or of an unknown protocol, raises UsageError with the address."""
    pytest.importorskip("distributed")
    from graphquant.batch import cluster

    monkeypatch.setattr(cluster, "SCHEDULER_TIMEOUT", "0.5s")
    (tmp_path / "a.onnx").touch()
    entries = load_entries([str(tmp_path / "a.onnx")])
    for address in ("tcp://127.0.0.1:9", "nothing://here"):
        with pytest.raises(UsageError, match=f"dask scheduler at {address}"):
            list(cluster_executor(address)(entries))
    assert list(cluster_executor("tcp://127.0.0.1:9")([])) == []


@pytest.mark.slow
def test_shards_obey_the_limits(tmp_path, monkeypatch, cluster):
    """Data functions that exit or hang do not end dask workers, with sharded calibration and without."""
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
        for fault, status, seconds in (("leave", "crashed", 300), ("wait", "timeout", 5)):
            limits = processes.WorkerLimits(timeout=seconds, retries=0)
            entries = load_entries(["a.onnx"], {"data": f"faults:{fault}", "output": "never.onnx"})
            assert [
                outcome.status for outcome in run_on_cluster(address, entries, partial(quantize_entry), limits)
            ] == [status]
        assert client.run(os.getpid) == before


@pytest.mark.slow
def test_killed_worker_leaves_no_folder(tmp_path, monkeypatch, cluster):
    """The temporary folder of a killed worker is removed when the next worker starts on the machine."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temp").mkdir()
    address, started = cluster(1)
    shutil.copy(ROOT / "sample_models" / "digits_cnn.onnx", tmp_path / "a.onnx")
    tmp_path.joinpath("faults.py").write_text("import time\ndef wait():\n    time.sleep(600)\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    (entry,) = load_entries(["a.onnx"], {"data": "faults:wait", "output": "never.onnx"})
    with ThreadPoolExecutor() as pool:
        outcomes = pool.submit(list, cluster_executor(address)([entry]))
        while not (folders := list(tmp_path.rglob("graphquant-stats-*"))):
            assert not outcomes.done()
            time.sleep(0.05)
        for process in reversed(started):
            os.killpg(process.pid, signal.SIGKILL)
        with pytest.raises(UsageError):
            outcomes.result()
    assert all(folder.exists() for folder in folders)
    tmp_path.joinpath("scheduler.json").unlink()
    cluster(1)
    assert not list(tmp_path.rglob("graphquant-stats-*"))


@pytest.mark.slow
def test_closing_the_iterator_ends_running_work(tmp_path, monkeypatch, cluster):
    """Closing the iterator ends all processes of the batch on the cluster. Another batch can use its workers."""
    address, _ = cluster(1)
    for name in ("digits_cnn.onnx", "digits_cnn_calib.npz"):
        shutil.copy(ROOT / "sample_models" / name, tmp_path)
    tmp_path.joinpath("faults.py").write_text(
        "import os, time\ndef wait():\n    open(f'started-{os.getpid()}', 'w').close()\n    time.sleep(600)\n",
        "utf-8",
    )
    monkeypatch.chdir(tmp_path)
    quick_entry = replace(*load_entries(["digits_cnn.onnx"], {"rules": ("weight_only",)}), name="quick")
    entries = [quick_entry, replace(quick_entry, name="wait", output="wait.onnx", rules=(), data="faults:wait")]
    running = cluster_executor(address)(entries)
    assert next(running).name == "quick"
    while not (started := list(tmp_path.glob("started-*"))):
        time.sleep(0.05)
    running.close()
    assert processes.process_memory(int(started[0].name.rpartition("-")[2])) == 0
    assert [outcome.status for outcome in cluster_executor(address)([quick_entry])] == ["done"]


@pytest.mark.slow
def test_lost_scheduler(tmp_path, monkeypatch, cluster):
    """Losing the scheduler raises UsageError. --resume continues after the finished outputs."""
    from graphquant.batch import cluster as module

    monkeypatch.setattr(module, "SCHEDULER_TIMEOUT", "5s")
    monkeypatch.chdir(tmp_path)
    address, started = cluster(1)
    shutil.copy(ROOT / "sample_models" / "digits_cnn.onnx", tmp_path / "a.onnx")
    for name in "bcd":
        shutil.copy(tmp_path / "a.onnx", tmp_path / f"{name}.onnx")
    entries = load_entries(["*.onnx"], {"rules": ("weight_only",), "output": "out/{name}"})

    def execute(todo):
        for outcome in cluster_executor(address)(todo):
            yield outcome
            started[0].kill()

    with pytest.raises(UsageError, match=r"scheduler is lost.* --resume"):
        run_batch(entries, BatchOptions(folder=tmp_path / "cache"), execute)
    report = run_batch(entries, BatchOptions(folder=tmp_path / "cache", resume=True), local_executor(1))
    assert [outcome.status for outcome in report.outcomes] == ["done"] * 4


@pytest.mark.slow
def test_cluster_without_workers(tmp_path, cluster):
    """A cluster without workers raises UsageError, because the batch would wait forever."""
    address, _ = cluster(0)
    (tmp_path / "a.onnx").touch()
    with pytest.raises(UsageError, match=f"{address} has no workers"):
        list(cluster_executor(address)(load_entries([str(tmp_path / "a.onnx")])))
