"""Runs of a batch in this process: the cache, the journal, outputs and failures."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from support.batch_reports import report_without_times

from graphquant.batch.cache import OutcomeCache, _read_cached_outcome, journal_path
from graphquant.batch.cache_key import file_digest
from graphquant.batch.run import BatchOptions, run_batch
from graphquant.batch.types import Digests, Entry, Gates, Outcome, record_json
from graphquant.batch.work import failed_outcome, quantize_entry
from graphquant.errors import UsageError
from graphquant.formats.onnx import file_writer
from graphquant.quantize import SkipCode


class Executor:
    """Execute entries in order and record their names. Raise KeyboardInterrupt after `stop` entries."""

    def __init__(self, stop=None):
        self.done, self._stop = [], stop

    def __call__(self, entries):
        """Yield the outcomes of entries."""
        for entry in entries:
            if len(self.done) == self._stop:
                raise KeyboardInterrupt
            self.done.append(entry.name)
            yield quantize_entry(entry)


@pytest.fixture
def batch_folder(tmp_path, samples, monkeypatch):
    """Return a folder with two models and their data."""
    for name in ("digits_cnn.onnx", "digits_rnn.onnx"):
        shutil.copy(samples / name, tmp_path)
        data = f"{Path(name).stem}_calib.npz"
        shutil.copy(samples / data, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sample_entry(stem, **changes):
    """Return the entry of a sample model."""
    settings = {"data": f"{stem}_calib.npz", "samples": 4} | changes
    return Entry(name=f"{stem}.onnx", model=f"{stem}.onnx", output=f"out/{stem}.onnx", **settings)


def batch_options(**settings):
    """Return options with a cache in the current folder."""
    return BatchOptions(folder=Path("cache"), **settings)


def two_entries():
    """Return the entries of both models."""
    return [sample_entry("digits_cnn"), sample_entry("digits_rnn", gates=Gates(min_sqnr=1, check=""))]


def run_entries(entries, execute=None, **settings):
    """Run a batch. Return the outcomes and the names of the entries that were executed."""
    execute = execute or Executor()
    report = run_batch(entries, batch_options(**settings), execute)
    return list(report.outcomes), execute.done


@pytest.mark.usefixtures("rules_alone")
def test_batch(batch_folder):
    """Models run by size, and are reported in the order of the entries with products, sizes and metrics."""
    outcomes, done = run_entries([*two_entries()][::-1])
    assert [outcome.name for outcome in outcomes] == ["digits_rnn.onnx", "digits_cnn.onnx"]
    assert done == ["digits_rnn.onnx", "digits_cnn.onnx"]  # 39 and 38 kB
    assert [outcome.status for outcome in outcomes] == ["done", "done"]
    cnn = outcomes[1]
    assert cnn.products == {"digits_cnn.onnx": cnn.digests.output}
    assert cnn.size_before == Path("digits_cnn.onnx").stat().st_size
    assert cnn.size_after == Path("out/digits_cnn.onnx").stat().st_size
    assert cnn.sites == 31
    assert set(cnn.skip_codes) <= {*SkipCode}
    assert sum(cnn.skip_codes.values()) == sum(cnn.skips.values()) > 0
    assert cnn.metrics.samples == 4
    assert cnn.metrics.sqnr > 20
    assert cnn.int8_ops[1] == 27


def test_finished_outputs_are_not_rebuilt(batch_folder):
    """A second run executes nothing. Its outcomes are "unchanged" and take no time."""
    first, _ = run_entries(two_entries())
    second, done = run_entries(two_entries())
    assert done == []
    assert second == [replace(outcome, status="unchanged", seconds=0.0) for outcome in first]
    assert all(outcome.seconds for outcome in first)


def test_a_removed_output_is_restored_from_the_cache(batch_folder):
    """A removed output is restored. An output that was edited is replaced only with --force."""
    run_entries(two_entries())
    outputs = [Path("out/digits_cnn.onnx"), Path("out/digits_rnn.onnx")]
    before = outputs[0].read_bytes()
    outputs[0].unlink()
    outputs[1].write_bytes(b"mine")
    outcomes, done = run_entries(two_entries())
    assert done == []
    assert outputs[0].read_bytes() == before
    assert outputs[1].read_bytes() == b"mine"
    assert [outcome.status for outcome in outcomes] == ["unchanged", "failed"]
    assert re.match(r"out/\S+ was changed after .*--force", outcomes[1].problem.message)
    assert outcomes[1].problem.exit_code == 2
    outcomes, done = run_entries(two_entries(), force=True)
    assert ([outcome.status for outcome in outcomes], done) == (["unchanged", "unchanged"], [])
    assert outputs[1].read_bytes() != b"mine"


def test_outputs_with_external_weights(batch_folder, monkeypatch):
    """Built or restored, an output has its own external weights, and earlier ones are removed."""
    monkeypatch.setattr(file_writer, "EXTERNALIZE_BYTES", 0)
    message = onnx.load("digits_cnn.onnx")
    onnx.save(message, "big.onnx", save_as_external_data=True, location="big.bin")
    runs = []
    for rules in ("weight_only", "weight_only_int4", "weight_only", "weight_only_int4"):
        outcomes, done = run_entries([sample_entry("big", data=None, samples=None, rules=(rules,))])
        digests = {path.name: file_digest(path) for path in Path("out").iterdir()}
        assert outcomes[0].products == digests
        (data,) = digests.keys() - {"big.onnx"}
        assert data == f"big.onnx.{digests[data][:16]}.data"
        runs.append((outcomes[0].status, len(done), digests))
    assert runs[2:] == [("unchanged", 0, digests) for _status, _done, digests in runs[:2]]
    assert runs[0][2] != runs[1][2]


@pytest.mark.slow
def test_outputs_without_their_cache(batch_folder):
    """Without the cache, outputs that name their model are replaced. Other files are not."""
    entries = [*two_entries(), replace(two_entries()[0], name="other", output="out/other.onnx")]
    run_entries(entries)
    shutil.rmtree("cache")
    shutil.copy("out/digits_rnn.onnx", "out/other.onnx")
    outcomes, done = run_entries(entries)
    assert [outcome.status for outcome in outcomes] == ["done", "done", "failed"]
    assert re.match(r"out/other\.onnx .* not from digits_cnn\.onnx .*--force", outcomes[2].problem.message)
    assert sorted(done) == ["digits_cnn.onnx", "digits_rnn.onnx"]
    shutil.rmtree("cache")
    shutil.copy("digits_cnn.onnx", "out/digits_cnn.onnx")
    assert re.match(r"out/digits_cnn\.onnx .* not created .*--force", run_entries(entries)[0][0].problem.message)


@pytest.mark.slow
def test_output_removed_during_the_run(batch_folder):
    """An output that disappears during the run is not cached, without a warning."""

    def execute(entries):
        for entry in entries:
            outcome = quantize_entry(entry)
            if entry.name == "digits_rnn.onnx":  # the first
                Path(entry.output).unlink()
            yield outcome

    warnings = []
    run_batch(two_entries(), batch_options(), execute, on_warning=warnings.append)
    assert warnings == []
    outcomes, done = run_entries(two_entries())
    assert done == ["digits_rnn.onnx"]
    assert [outcome.status for outcome in outcomes] == ["unchanged", "done"]


def test_damaged_cache_file_is_rebuilt(batch_folder):
    """A cached file whose content does not match its digest is rebuilt."""
    (first, _), _ = run_entries(two_entries())
    cached = next(Path("cache/files").glob(f"*/{first.digests.output}"))
    cached.write_bytes(b"x" * cached.stat().st_size)
    Path("out/digits_cnn.onnx").unlink()
    outcomes, done = run_entries(two_entries())
    assert done == ["digits_cnn.onnx"]
    assert outcomes[0].digests.output == first.digests.output
    assert cached.read_bytes() == Path("out/digits_cnn.onnx").read_bytes()


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("digits_cnn.onnx", "../precious"),
        ("digits_cnn.onnx", "{folder}/precious"),
        ("../precious", "0" * 64),
        ("", "0" * 64),
        (None, ""),
    ],
)
def test_forged_cache_entries_are_ignored(batch_folder, name, digest):
    """A cached outcome without files, or with paths outside of the cache, is ignored and deletes nothing."""
    (first, _), _ = run_entries(two_entries())
    Path("precious").write_bytes(b"mine")
    cached = next(Path("cache/outcomes").glob(f"*/{first.digests.key}.json"))
    content = json.loads(cached.read_bytes())
    content["products"] = {} if name is None else {name: digest.format(folder=batch_folder)}
    cached.write_text(json.dumps(content))
    Path("out/digits_cnn.onnx").unlink()
    outcomes, done = run_entries(two_entries())
    assert done == ["digits_cnn.onnx"]
    assert outcomes[0].digests.output == first.digests.output
    assert Path("precious").read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["../net.onnx", "a/../../net.onnx", "a/..", "/net.onnx", "", "."])
def test_cached_files_are_inside_the_folder(tmp_path, name):
    """A cached outcome is ignored if the name of a product leads out of the output's folder, or names no file."""
    outcome = Outcome(name="net", model="net.onnx", output="out/net.onnx", status="done", digests=Digests(key="key"))
    for products in ({"net.onnx": "a" * 64}, {"a/..b/net.onnx": "a" * 64}, {"net.onnx": "a" * 64, name: "b" * 64}):
        stored = replace(outcome, products=products)
        (tmp_path / "key.json").write_text(json.dumps(record_json(stored)))
        assert _read_cached_outcome(tmp_path / "key.json") == (None if name in products else stored)


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 5},
        {"method": "minmax"},
        {"rules": ("fixed_point",)},
        {"exclude": ("conv1",)},
        {"float_weights": True},
        {"gates": Gates(check="")},
    ],
)
def test_inputs_of_the_cache_key(batch_folder, change):
    """Changing an option rebuilds the output."""
    run_entries([sample_entry("digits_cnn")])
    assert run_entries([sample_entry("digits_cnn", **change)])[1] == ["digits_cnn.onnx"]


def test_file_contents_are_part_of_the_cache_key(batch_folder):
    """Changed models, data or rules rebuild the output. A new modification time does not."""
    Path("mine.toml").write_text(Path(__file__).parents[2].joinpath("rules/tensorrt.toml").read_text())
    entry = sample_entry("digits_cnn", rules=("mine.toml",))
    run_entries([entry])
    Path("digits_cnn.onnx").touch()
    assert run_entries([entry])[1] == []
    with Path("mine.toml").open("a") as file:
        file.write("# more\n")
    assert run_entries([entry])[1] == ["digits_cnn.onnx"]
    shutil.copy("digits_rnn_calib.npz", "digits_cnn_calib.npz")
    assert run_entries([entry])[1] == ["digits_cnn.onnx"]


def test_gates_apply_to_cached_outputs(batch_folder):
    """A size gate is checked on a cached output without rebuilding it."""
    first, _ = run_entries([sample_entry("digits_cnn")])
    outcomes, done = run_entries([sample_entry("digits_cnn", gates=Gates(max_size=10))])
    assert done == []
    assert outcomes[0].status == "gate"
    assert [miss.gate for miss in outcomes[0].misses] == ["max_size"]
    assert f"{first[0].size_after} bytes" in outcomes[0].misses[0].message


@pytest.mark.slow
def test_bounds_are_part_of_the_cache_key(batch_folder):
    """An output searched for with one bound is not reused for another, nor by --resume."""
    contents = []
    for bound in (20, 56, 20):
        entry = sample_entry("digits_cnn", samples=40, gates=Gates(min_sqnr=bound))
        _, done = run_entries([entry], resume=True)
        contents.append(Path(entry.output).read_bytes())
        assert done == (["digits_cnn.onnx"] if len(contents) < 3 else [])
        assert run_entries([entry])[1] == []
    assert contents[0] == contents[2] != contents[1]


@pytest.mark.slow
def test_without_the_cache(batch_folder):
    """Without the cache every output is rebuilt, and replaces that of an earlier batch."""
    run_entries(two_entries(), cache=False)
    assert not Path("cache/files").exists()
    outcomes, done = run_entries(two_entries(), cache=False)
    assert sorted(done) == ["digits_cnn.onnx", "digits_rnn.onnx"]
    assert [outcome.status for outcome in outcomes] == ["done", "done"]


def test_failure_affects_one_entry(batch_folder):
    """Invalid models, data and rules fail with the errors of `insert`. The other entries are done."""
    Path("broken.onnx").write_bytes(b"\xff" * 100)
    Path("bad.toml").write_text("[[rule]]\nname = 'x'\n")
    entries = [
        Entry(name="broken", model="broken.onnx", output="out/broken.onnx"),
        Entry(name="missing", model="missing.onnx", output="out/missing.onnx"),
        replace(sample_entry("digits_rnn"), name="no data", data="nothing.npz"),
        replace(sample_entry("digits_rnn"), name="rules", rules=("bad.toml",), output="out/2.onnx"),
        replace(sample_entry("digits_rnn"), name="needs", data=None, output="out/3.onnx"),
        sample_entry("digits_cnn"),
    ]
    outcomes, _ = run_entries(entries)
    assert [outcome.status for outcome in outcomes] == ["failed"] * 5 + ["done"]
    kinds = ["ModelError", "ModelError", "DataError", "RuleError", "NeedsDataError"]
    assert [outcome.problem.kind for outcome in outcomes[:5]] == kinds
    assert [outcome.problem.exit_code for outcome in outcomes[:5]] == [3, 3, 2, 2, 2]
    assert "no file missing.onnx" in outcomes[1].problem.message
    assert sorted(path.name for path in Path("out").iterdir()) == ["digits_cnn.onnx"]


@pytest.mark.slow
def test_stop_and_resume(batch_folder):
    """A resumed batch executes only unfinished entries. Its report equals that of an uninterrupted one."""
    expected = [replace(outcome, seconds=0.0) for outcome in run_entries(two_entries())[0]]
    shutil.rmtree("cache")
    shutil.rmtree("out")
    outcomes, done = run_entries(two_entries(), Executor(stop=1), cache=False)
    assert [outcome.status for outcome in outcomes] == ["skipped", "done"]
    assert done == ["digits_rnn.onnx"]
    outcomes, done = run_entries(two_entries(), cache=False, resume=True)
    assert done == ["digits_cnn.onnx"]
    assert [replace(outcome, seconds=0.0) for outcome in outcomes] == expected


def test_outputs_written_while_stopping_are_claimed(batch_folder):
    """Outputs that the executor writes while it is stopped belong to the batch."""

    def execute(entries):
        try:
            yield quantize_entry(entries[0])
        finally:
            quantize_entry(entries[1])  # was about to write it

    def stop(_outcome):
        raise KeyboardInterrupt

    report = run_batch(two_entries(), batch_options(cache=False), execute, on_outcome=stop)
    assert [outcome.status for outcome in report.outcomes] == ["skipped", "done"]
    assert Path("out/digits_cnn.onnx").exists()
    assert [outcome.status for outcome in run_entries(two_entries(), cache=False, resume=True)[0]] == ["done", "done"]


@pytest.mark.slow
def test_resume_verifies_existing_outputs(batch_folder):
    """--resume rebuilds outputs that are missing or whose settings changed."""
    run_entries(two_entries(), cache=False)
    Path("out/digits_cnn.onnx").unlink()
    assert run_entries(two_entries(), cache=False, resume=True)[1] == ["digits_cnn.onnx"]
    changed = [sample_entry("digits_cnn"), replace(two_entries()[1], method="minmax")]
    assert run_entries(changed, cache=False, resume=True)[1] == ["digits_rnn.onnx"]


def test_resume_retries_failures(batch_folder):
    """--resume retries timeouts and failures, because limits and packages are not part of the key."""

    def execute(entries):
        yield from (failed_outcome(entry, "Timeout", "It took long.", 1, "timeout") for entry in entries)

    assert [outcome.status for outcome in run_batch(two_entries(), batch_options(), execute).outcomes] == [
        "timeout",
        "timeout",
    ]
    outcomes, done = run_entries(two_entries(), resume=True)
    assert sorted(done) == ["digits_cnn.onnx", "digits_rnn.onnx"]
    assert [outcome.status for outcome in outcomes] == ["done", "done"]


@pytest.mark.slow
def test_truncated_journal(batch_folder):
    """A truncated line is ignored, and later lines are valid."""
    run_entries(two_entries(), cache=False)
    path = journal_path(Path("cache"), two_entries())
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:50])
    assert run_entries(two_entries(), cache=False, resume=True)[1] == ["digits_cnn.onnx"]
    assert run_entries(two_entries(), cache=False, resume=True)[1] == []
    assert [json.loads(line)["name"] for line in path.read_bytes().splitlines()] == [
        "digits_rnn.onnx",
        "digits_cnn.onnx",
    ]


def test_output_is_synced_before_its_outcome(batch_folder, monkeypatch):
    """File and folder are synced, so that the journal has no output that a crash of the machine lost."""
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), fsync(file)))
    quantize_entry(sample_entry("digits_cnn"))
    assert {Path("out/digits_cnn.onnx").stat().st_ino, Path("out").stat().st_ino} <= synced


def test_journal_of_remote_outputs(batch_folder, monkeypatch):
    """The journal's path does not depend on the current folder."""
    entries = [replace(sample_entry("digits_cnn"), output="s3://bucket/out.onnx")]
    expected = journal_path(Path("cache"), entries)
    monkeypatch.chdir("/")
    assert journal_path(Path("cache"), entries) == expected


def test_concurrent_batches(batch_folder):
    """A second batch with the same outputs raises UsageError while the first one runs."""

    def execute(entries):
        with pytest.raises(UsageError, match="already running"):
            run_batch(two_entries(), batch_options(), Executor())
        yield from map(quantize_entry, entries)

    report = run_batch(two_entries(), batch_options(), execute)
    assert [outcome.status for outcome in report.outcomes] == ["done", "done"]


def test_model_changed_during_the_run_is_not_cached(batch_folder):
    """The output is not cached, because the version of the model it was built from is unknown."""

    def execute(entries):
        for entry in entries:
            outcome = quantize_entry(entry)
            shutil.copy("digits_rnn.onnx", "digits_cnn.onnx")
            yield outcome

    outcomes = run_batch([sample_entry("digits_cnn")], batch_options(), execute).outcomes
    assert outcomes[0].status == "done"
    assert OutcomeCache(Path("cache")).load_outcome(outcomes[0].digests.key) is None


def test_data_changed_during_the_run(batch_folder):
    """Outputs of data that changed during the run are not cached. Others are."""

    def execute(entries):
        yield from map(quantize_entry, entries)
        shutil.copy("digits_rnn_calib.npz", "digits_cnn_calib.npz")

    outcomes = run_batch(two_entries(), batch_options(), execute).outcomes
    cached = [OutcomeCache(Path("cache")).load_outcome(outcome.digests.key) is not None for outcome in outcomes]
    assert cached == [False, True]


def test_data_functions_are_not_cached(batch_folder):
    """Outputs of a data function are rebuilt, because its data is unknown. --resume reuses them."""
    Path("feeds.py").write_text(
        "import numpy\n\ndef feeds():\n    data = numpy.load('digits_cnn_calib.npz')\n"
        "    return [{name: data[name][i : i + 1] for name in data.files} for i in range(4)]\n"
    )
    entry = sample_entry("digits_cnn", data="feeds:feeds", samples=None)
    assert run_entries([entry])[0][0].status == "done"
    assert run_entries([entry])[1] == ["digits_cnn.onnx"]
    assert run_entries([entry], resume=True)[1] == []


@pytest.mark.slow
def test_report_without_times(batch_folder):
    """Two runs give the same report without times."""
    runs = [run_batch(two_entries(), batch_options(cache=False), Executor()) for _ in range(2)]
    reports = [report_without_times(run) for run in runs]
    assert reports[0] == reports[1]
    assert isinstance(reports[0]["outcomes"][0]["sites"], int)


def test_pruning_the_cache(batch_folder):
    """The least recently used outcomes are removed first, with the files that no other outcome needs."""
    (rnn, cnn), _ = run_entries(two_entries()[::-1])
    run_entries(two_entries()[1:])  # used once more
    cache = OutcomeCache(Path("cache"))
    assert cache.prune("1d") == (0, 0)
    assert cache.prune(f"{rnn.size_after + 10}") == (1, cnn.size_after)
    assert cache.load_outcome(cnn.digests.key) is None
    assert isinstance(cache.load_outcome(rnn.digests.key), Outcome)
    assert cache.prune("0d") == (1, rnn.size_after)
    assert list(Path("cache/files").glob("*/*")) == []
    with pytest.raises(UsageError, match="soon"):
        cache.prune("soon")


def test_journals_are_pruned(batch_folder):
    """Old journals are removed unless a running batch uses them."""
    path = journal_path(Path("cache"), two_entries())

    def execute(entries):
        os.utime(path, (1, 1))
        OutcomeCache(Path("cache")).prune("2GB")
        assert path.exists()
        yield from (failed_outcome(entry, "Timeout", "It took long.", 1, "timeout") for entry in entries)

    run_batch(two_entries(), batch_options(), execute)
    OutcomeCache(Path("cache")).prune("2GB")
    assert path.exists()
    os.utime(path, (1, 1))
    OutcomeCache(Path("cache")).prune("2GB")
    assert not path.exists()


def test_failure_releases_the_output(batch_folder):
    """After a failure or a stop, a file that a user puts at the output is not replaced."""
    without_data = replace(sample_entry("digits_cnn"), data=None)
    assert run_entries([without_data])[0][0].problem.kind == "NeedsDataError"
    assert run_entries([sample_entry("digits_rnn")], Executor(stop=0))[0][0].status == "skipped"
    for name in ("digits_cnn.onnx", "digits_rnn.onnx"):
        Path("out", name).write_bytes(b"mine")
    outcomes, done = run_entries(two_entries())
    assert done == []
    assert [(outcome.status, outcome.problem.kind) for outcome in outcomes] == [("failed", "UsageError")] * 2
    assert [Path("out", name).read_bytes() for name in ("digits_cnn.onnx", "digits_rnn.onnx")] == [b"mine"] * 2


def test_failure_keeps_an_earlier_output(batch_folder):
    """A failure keeps the earlier output, which the next batch replaces unless a user edited it."""
    run_entries([sample_entry("digits_cnn")])
    before = Path("out/digits_cnn.onnx").read_bytes()
    without_data = replace(sample_entry("digits_cnn"), data=None)
    assert run_entries([without_data])[0][0].status == "failed"
    assert Path("out/digits_cnn.onnx").read_bytes() == before
    assert run_entries([sample_entry("digits_cnn", samples=5)])[0][0].status == "done"
    run_entries([without_data])
    Path("out/digits_cnn.onnx").write_bytes(b"mine")
    (outcome,), done = run_entries([sample_entry("digits_cnn", samples=6)])
    assert (outcome.status, outcome.problem.kind, done) == ("failed", "UsageError", [])
    assert Path("out/digits_cnn.onnx").read_bytes() == b"mine"


def test_nothing_to_quantize_is_a_status(batch_folder):
    """A model in which no tensor would be quantized fails without an output, unless the entry accepts it."""
    entry = sample_entry("digits_cnn", exclude=("*",))
    (empty,), _ = run_entries([entry])
    assert (empty.status, empty.passed, empty.problem.exit_code) == ("empty", False, 1)
    assert not Path(entry.output).exists()
    (accepted,), _ = run_entries([replace(entry, allow_empty=True)])
    assert (accepted.status, accepted.sites, accepted.quantized_share) == ("done", 0, 0.0)


def test_share_of_quantized_macs_is_a_gate(batch_folder):
    """The share of multiply-adds with quantized inputs is stored with the outcome, and compared with its gate."""
    entry = sample_entry("digits_cnn", rules=("weight_only",), gates=Gates(min_quantized=0.5))
    (missed,), _ = run_entries([entry])
    assert (missed.status, missed.quantized_share) == ("gate", 0.0)
    assert [miss.gate for miss in missed.misses] == ["min_quantized"]
    (done,), executed = run_entries([replace(entry, gates=Gates(min_quantized=0.0))])
    assert (done.status, executed) == ("unchanged", [])
