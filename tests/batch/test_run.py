"""The story of a batch, done in this process: what is known, what is done, what is kept."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from graphquant.batch.cache import OutcomeCache, journal_path
from graphquant.batch.cache_key import file_digest
from graphquant.batch.run import BatchOptions, run_batch
from graphquant.batch.types import Entry, Gates, Outcome, batch_report_json
from graphquant.batch.work import failed_outcome, quantize_entry
from graphquant.errors import UsageError
from graphquant.formats.onnx import file_writer


class Executor:
    """Does entries one after the other, and remembers which; stops as Ctrl-C does after so many."""

    def __init__(self, stop=None):
        self.done, self._stop = [], stop

    def __call__(self, entries):
        """Gives their outcomes."""
        for entry in entries:
            if len(self.done) == self._stop:
                raise KeyboardInterrupt
            self.done.append(entry.name)
            yield quantize_entry(entry)


@pytest.fixture
def here(tmp_path, samples, monkeypatch):
    """A folder with three models, two of them with data."""
    for name in ("digits_cnn.onnx", "digits_rnn.onnx"):
        shutil.copy(samples / name, tmp_path)
        data = f"{Path(name).stem}_calib.npz"
        shutil.copy(samples / data, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def entry(stem, **options):
    """The entry of a sample model."""
    given = {"data": f"{stem}_calib.npz", "samples": 4} | options
    return Entry(name=f"{stem}.onnx", model=f"{stem}.onnx", output=f"out/{stem}.onnx", **given)


def options(**given):
    """Where things are kept here."""
    return BatchOptions(folder=Path("cache"), **given)


def two_entries():
    """The two entries."""
    return [entry("digits_cnn"), entry("digits_rnn", gates=Gates(min_sqnr=1, check=""))]


def run(entries, execute=None, **given):
    """The outcomes of a batch, and what was worked on."""
    execute = execute or Executor()
    report = run_batch(entries, options(**given), execute)
    return list(report.outcomes), execute.done


def test_a_batch(here):
    """Models are made in the order of their size and reported in that of the manifest, with what they are made of."""
    outcomes, done = run([*two_entries()][::-1])
    assert [one.name for one in outcomes] == ["digits_rnn.onnx", "digits_cnn.onnx"]
    assert done == ["digits_rnn.onnx", "digits_cnn.onnx"]  # 39 and 38 kB
    assert [one.status for one in outcomes] == ["done", "done"]
    one = outcomes[1]
    assert one.products == {"digits_cnn.onnx": one.digests.output}
    assert one.size_before == Path("digits_cnn.onnx").stat().st_size
    assert one.size_after == Path("out/digits_cnn.onnx").stat().st_size
    assert one.sites == 24
    assert one.metrics.samples == 4
    assert one.metrics.sqnr > 20
    assert one.int8_ops[1] == 27


def test_finished_outputs_are_not_rebuilt(here):
    """A second run works on nothing and tells the same but for the word "unchanged", and that it took no time."""
    first, _ = run(two_entries())
    second, done = run(two_entries())
    assert done == []
    assert second == [replace(one, status="unchanged", seconds=0.0) for one in first]
    assert all(one.seconds for one in first)


def test_a_removed_output_is_restored_from_the_cache(here):
    """It has the same bytes; one that somebody changed is not touched without --force."""
    run(two_entries())
    outputs = [Path("out/digits_cnn.onnx"), Path("out/digits_rnn.onnx")]
    before = outputs[0].read_bytes()
    outputs[0].unlink()
    outputs[1].write_bytes(b"mine")
    outcomes, done = run(two_entries())
    assert done == []
    assert outputs[0].read_bytes() == before
    assert outputs[1].read_bytes() == b"mine"
    assert [one.status for one in outcomes] == ["unchanged", "failed"]
    assert "was changed after a batch wrote it." in outcomes[1].problem.message
    assert outcomes[1].problem.exit_code == 2
    outcomes, done = run(two_entries(), force=True)
    assert ([one.status for one in outcomes], done) == (["unchanged", "unchanged"], [])
    assert outputs[1].read_bytes() != b"mine"


def test_outputs_with_external_weights(here, monkeypatch):
    """Made or from the cache, an output has its own weights beside it, and those before are gone."""
    monkeypatch.setattr(file_writer, "EXTERNALIZE_BYTES", 0)
    message = onnx.load("digits_cnn.onnx")
    onnx.save(message, "big.onnx", save_as_external_data=True, location="big.bin")
    made = []
    for rules in ("weight_only", "weight_only_int4", "weight_only", "weight_only_int4"):
        outcomes, done = run([entry("big", data=None, samples=None, rules=(rules,))])
        there = {path.name: file_digest(path) for path in Path("out").iterdir()}
        assert outcomes[0].products == there
        (data,) = there.keys() - {"big.onnx"}
        assert data == f"big.onnx.{there[data][:16]}.data"
        made.append((outcomes[0].status, len(done), there))
    assert made[2:] == [("unchanged", 0, there) for _status, _done, there in made[:2]]
    assert made[0][2] != made[1][2]


def test_a_lost_cache(here):
    """Outputs that say they were made of their models are the batch's; other files and models are not."""
    entries = [*two_entries(), replace(two_entries()[0], name="other", output="out/other.onnx")]
    run(entries)
    shutil.rmtree("cache")
    shutil.copy("out/digits_rnn.onnx", "out/other.onnx")
    outcomes, done = run(entries)
    assert [one.status for one in outcomes] == ["done", "done", "failed"]
    assert "not of digits_cnn.onnx in its current state" in outcomes[2].problem.message
    assert sorted(done) == ["digits_cnn.onnx", "digits_rnn.onnx"]
    shutil.rmtree("cache")
    shutil.copy("digits_cnn.onnx", "out/digits_cnn.onnx")
    assert "was not created by a batch" in run(entries)[0][0].problem.message


def test_an_output_removed_at_once(here):
    """It is not kept, without a word, and the others are."""

    def execute(entries):
        for one in entries:
            made = quantize_entry(one)
            if one.name == "digits_rnn.onnx":  # the first
                Path(one.output).unlink()
            yield made

    warned = []
    run_batch(two_entries(), options(), execute, on_warning=warned.append)
    assert warned == []
    outcomes, done = run(two_entries())
    assert done == ["digits_rnn.onnx"]
    assert [one.status for one in outcomes] == ["unchanged", "done"]


def test_a_damaged_cache_is_not_used(here):
    """A file in it that has other bytes than its name says is made anew."""
    (first, _), _ = run(two_entries())
    kept = next(Path("cache/files").glob(f"*/{first.digests.output}"))
    kept.write_bytes(b"x" * kept.stat().st_size)
    Path("out/digits_cnn.onnx").unlink()
    outcomes, done = run(two_entries())
    assert done == ["digits_cnn.onnx"]
    assert outcomes[0].digests.output == first.digests.output
    assert kept.read_bytes() == Path("out/digits_cnn.onnx").read_bytes()


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
def test_a_cache_filled_by_someone_else(here, name, digest):
    """An outcome without files, or whose digests or names lead elsewhere, counts for nothing and removes nothing."""
    (first, _), _ = run(two_entries())
    Path("precious").write_bytes(b"mine")
    kept = next(Path("cache/outcomes").glob(f"*/{first.digests.key}.json"))
    told = json.loads(kept.read_bytes())
    told["products"] = {} if name is None else {name: digest.format(folder=here)}
    kept.write_text(json.dumps(told))
    Path("out/digits_cnn.onnx").unlink()
    outcomes, done = run(two_entries())
    assert done == ["digits_cnn.onnx"]
    assert outcomes[0].digests.output == first.digests.output
    assert Path("precious").read_bytes() == b"mine"


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
def test_inputs_of_the_cache_key(here, change):
    """Another option is another output."""
    run([entry("digits_cnn")])
    assert run([entry("digits_cnn", **change)])[1] == ["digits_cnn.onnx"]


def test_the_content_of_files_counts(here):
    """A model, data or rules that changed are seen; the same content under another time is the same."""
    Path("mine.toml").write_text(Path(__file__).parents[2].joinpath("rules/tensorrt.toml").read_text())
    made = entry("digits_cnn", rules=("mine.toml",))
    run([made])
    Path("digits_cnn.onnx").touch()
    assert run([made])[1] == []
    with Path("mine.toml").open("a") as file:
        file.write("# more\n")
    assert run([made])[1] == ["digits_cnn.onnx"]
    shutil.copy("digits_rnn_calib.npz", "digits_cnn_calib.npz")
    assert run([made])[1] == ["digits_cnn.onnx"]


def test_gates_apply_to_cached_outputs(here):
    """Another size needs no work; another bound does, for the output is searched for by it."""
    first, _ = run([entry("digits_cnn")])
    outcomes, done = run([entry("digits_cnn", gates=Gates(max_size=10))])
    assert done == []
    assert outcomes[0].status == "gate"
    assert [miss.gate for miss in outcomes[0].misses] == ["max_size"]
    assert f"{first[0].size_after} bytes" in outcomes[0].misses[0].message


@pytest.mark.parametrize("bounds", [(20, 56), (56, 20)])
def test_bounds_are_part_of_the_cache_key(here, bounds):
    """What was searched for by one bound is not taken from the cache for another, nor by --resume."""
    made = []
    for bound in bounds:
        one = entry("digits_cnn", samples=40, gates=Gates(min_sqnr=bound))
        _, done = run([one], resume=True)
        assert done == ["digits_cnn.onnx"]
        made.append(Path(one.output).read_bytes())
        assert run([one])[1] == []
    assert made[0] != made[1]


def test_without_the_cache(here):
    """Everything is made, and what a batch wrote may be replaced by it."""
    run(two_entries(), cache=False)
    assert not Path("cache/files").exists()
    outcomes, done = run(two_entries(), cache=False)
    assert sorted(done) == ["digits_cnn.onnx", "digits_rnn.onnx"]
    assert [one.status for one in outcomes] == ["done", "done"]


def test_a_failure_affects_one_model(here):
    """A damaged or missing model, missing data, mistaken rules are told as insert tells them; the rest is done."""
    Path("broken.onnx").write_bytes(b"\xff" * 100)
    Path("bad.toml").write_text("[[rule]]\nname = 'x'\n")
    entries = [
        Entry(name="broken", model="broken.onnx", output="out/broken.onnx"),
        Entry(name="missing", model="missing.onnx", output="out/missing.onnx"),
        replace(entry("digits_rnn"), name="no data", data="nothing.npz"),
        replace(entry("digits_rnn"), name="rules", rules=("bad.toml",), output="out/2.onnx"),
        replace(entry("digits_rnn"), name="needs", data=None, output="out/3.onnx"),
        entry("digits_cnn"),
    ]
    outcomes, _ = run(entries)
    assert [one.status for one in outcomes] == ["failed"] * 5 + ["done"]
    kinds = ["ModelError", "ModelError", "DataError", "RuleError", "NeedsDataError"]
    assert [one.problem.kind for one in outcomes[:5]] == kinds
    assert [one.problem.exit_code for one in outcomes[:5]] == [3, 3, 2, 2, 2]
    assert "There is no file missing.onnx" in outcomes[1].problem.message
    assert sorted(path.name for path in Path("out").iterdir()) == ["digits_cnn.onnx"]


def test_stopped_and_resumed(here):
    """What was finished is kept and not done again; the report is that of a run that nobody stopped."""
    expected = [replace(one, seconds=0.0) for one in run(two_entries())[0]]
    shutil.rmtree("cache")
    shutil.rmtree("out")
    outcomes, done = run(two_entries(), Executor(stop=1), cache=False)
    assert [one.status for one in outcomes] == ["skipped", "done"]
    assert done == ["digits_rnn.onnx"]
    outcomes, done = run(two_entries(), cache=False, resume=True)
    assert done == ["digits_cnn.onnx"]
    assert [replace(one, seconds=0.0) for one in outcomes] == expected


def test_outputs_written_while_stopping_are_claimed(here):
    """An executor has ended all its work before it is said which outputs are not there."""

    def execute(entries):
        try:
            yield quantize_entry(entries[0])
        finally:
            quantize_entry(entries[1])  # was about to write it

    def stop(_outcome):
        raise KeyboardInterrupt

    report = run_batch(two_entries(), options(cache=False), execute, on_outcome=stop)
    assert [one.status for one in report.outcomes] == ["skipped", "done"]
    assert Path("out/digits_cnn.onnx").exists()
    assert [one.status for one in run(two_entries(), cache=False, resume=True)[0]] == ["done", "done"]


def test_resume_verifies_existing_outputs(here):
    """A finished model whose output is gone, or whose rules changed, is made again."""
    run(two_entries(), cache=False)
    Path("out/digits_cnn.onnx").unlink()
    assert run(two_entries(), cache=False, resume=True)[1] == ["digits_cnn.onnx"]
    changed = [entry("digits_cnn"), replace(two_entries()[1], method="minmax")]
    assert run(changed, cache=False, resume=True)[1] == ["digits_rnn.onnx"]


def test_resume_retries_failures(here):
    """What timed out, or had no package or no room, may go well with other limits, which the key has not."""

    def execute(entries):
        yield from (failed_outcome(one, "Timeout", "It took long.", 1, "timeout") for one in entries)

    assert [one.status for one in run_batch(two_entries(), options(), execute).outcomes] == ["timeout", "timeout"]
    outcomes, done = run(two_entries(), resume=True)
    assert sorted(done) == ["digits_cnn.onnx", "digits_rnn.onnx"]
    assert [one.status for one in outcomes] == ["done", "done"]


def test_a_truncated_journal(here):
    """A line that was not written to its end counts for nothing, and what is added later is read again."""
    run(two_entries(), cache=False)
    path = journal_path(Path("cache"), two_entries())
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:50])
    assert run(two_entries(), cache=False, resume=True)[1] == ["digits_cnn.onnx"]
    assert run(two_entries(), cache=False, resume=True)[1] == []
    assert [json.loads(line)["name"] for line in path.read_bytes().splitlines()] == [
        "digits_rnn.onnx",
        "digits_cnn.onnx",
    ]


def test_an_output_is_on_the_disk_before_its_outcome(here, monkeypatch):
    """Its bytes and its name, so that after a crash of the machine the journal knows nothing that is not there."""
    synced, really = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), really(file)))
    quantize_entry(entry("digits_cnn"))
    assert {Path("out/digits_cnn.onnx").stat().st_ino, Path("out").stat().st_ino} <= synced


def test_the_journal_of_remote_outputs(here, monkeypatch):
    """It does not depend on the folder in which the batch was started."""
    far = [replace(entry("digits_cnn"), output="s3://bucket/out.onnx")]
    before = journal_path(Path("cache"), far)
    monkeypatch.chdir("/")
    assert journal_path(Path("cache"), far) == before


def test_a_batch_runs_once_at_a_time(here):
    """A second run of the same outputs is refused while the first is at it."""

    def execute(entries):
        with pytest.raises(UsageError, match="already running"):
            run_batch(two_entries(), options(), Executor())
        yield from map(quantize_entry, entries)

    report = run_batch(two_entries(), options(), execute)
    assert [one.status for one in report.outcomes] == ["done", "done"]


def test_a_model_changed_during_the_run_is_not_cached(here):
    """Nobody knows which of the two the output was made of."""

    def execute(entries):
        for one in entries:
            made = quantize_entry(one)
            shutil.copy("digits_rnn.onnx", "digits_cnn.onnx")
            yield made

    outcomes = run_batch([entry("digits_cnn")], options(), execute).outcomes
    assert outcomes[0].status == "done"
    assert OutcomeCache(Path("cache")).load_outcome(outcomes[0].digests.key) is None


def test_data_changed_during_the_run(here):
    """What was made while it did is no more in the cache; what has other data is."""

    def execute(entries):
        yield from map(quantize_entry, entries)
        shutil.copy("digits_rnn_calib.npz", "digits_cnn_calib.npz")

    outcomes = run_batch(two_entries(), options(), execute).outcomes
    kept = [OutcomeCache(Path("cache")).load_outcome(one.digests.key) is not None for one in outcomes]
    assert kept == [False, True]


def test_data_functions_are_run(here):
    """What they give is known only then, so that nothing made with them comes from the cache; --resume trusts them."""
    Path("feeds.py").write_text(
        "import numpy\n\ndef feeds():\n    data = numpy.load('digits_cnn_calib.npz')\n"
        "    return [{name: data[name][i : i + 1] for name in data.files} for i in range(4)]\n"
    )
    made = entry("digits_cnn", data="feeds:feeds", samples=None)
    assert run([made])[0][0].status == "done"
    assert run([made])[1] == ["digits_cnn.onnx"]
    assert run([made], resume=True)[1] == []


def test_a_report_without_times(here):
    """Two runs give the same report but for times."""
    made = [run_batch(two_entries(), options(cache=False), Executor()) for _ in range(2)]
    reports = [batch_report_json(report, times=False) for report in made]
    assert reports[0] == reports[1]
    assert isinstance(reports[0]["outcomes"][0]["sites"], int)


def test_pruning_the_cache(here):
    """What was not used longest goes first, and files that no outcome needs go with it."""
    (rnn, cnn), _ = run(two_entries()[::-1])
    run(two_entries()[1:])  # used once more
    cache = OutcomeCache(Path("cache"))
    assert cache.prune("1d") == (0, 0)
    assert cache.prune(f"{rnn.size_after + 10}") == (1, cnn.size_after)
    assert cache.load_outcome(cnn.digests.key) is None
    assert isinstance(cache.load_outcome(rnn.digests.key), Outcome)
    assert cache.prune("0d") == (1, rnn.size_after)
    assert list(Path("cache/files").glob("*/*")) == []
    with pytest.raises(UsageError, match="soon"):
        cache.prune("soon")


def test_journals_are_pruned(here):
    """Those that nothing was written to for so long, unless a batch holds it."""
    path = journal_path(Path("cache"), two_entries())

    def execute(entries):
        os.utime(path, (1, 1))
        OutcomeCache(Path("cache")).prune("2GB")
        assert path.exists()
        yield from (failed_outcome(one, "Timeout", "It took long.", 1, "timeout") for one in entries)

    run_batch(two_entries(), options(), execute)
    OutcomeCache(Path("cache")).prune("2GB")
    assert path.exists()
    os.utime(path, (1, 1))
    OutcomeCache(Path("cache")).prune("2GB")
    assert not path.exists()


def test_a_failure_releases_the_output(here):
    """A file that somebody puts where a model failed, or where a batch was stopped, is not replaced."""
    wanting = replace(entry("digits_cnn"), data=None)
    assert run([wanting])[0][0].problem.kind == "NeedsDataError"
    assert run([entry("digits_rnn")], Executor(stop=0))[0][0].status == "skipped"
    for name in ("digits_cnn.onnx", "digits_rnn.onnx"):
        Path("out", name).write_bytes(b"mine")
    outcomes, done = run(two_entries())
    assert done == []
    assert ["was not created by a batch" in one.problem.message for one in outcomes] == [True, True]


def test_a_failure_keeps_an_earlier_output(here):
    """It stays what it is and the batch's: the next run replaces it, and not what somebody put in its place."""
    run([entry("digits_cnn")])
    before = Path("out/digits_cnn.onnx").read_bytes()
    wanting = replace(entry("digits_cnn"), data=None)
    assert run([wanting])[0][0].status == "failed"
    assert Path("out/digits_cnn.onnx").read_bytes() == before
    assert run([entry("digits_cnn", samples=5)])[0][0].status == "done"
    run([wanting])
    Path("out/digits_cnn.onnx").write_bytes(b"mine")
    assert "was changed after a batch wrote it." in run([entry("digits_cnn", samples=6)])[0][0].problem.message
