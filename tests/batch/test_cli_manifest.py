"""`graphquant batch` on the command line with manifests, shards and a scheduler."""

import json
import shutil
from pathlib import Path

import pytest
from support.batch_reports import report_without_times
from support.cli import invoke_cli

from graphquant.batch.manifest_schema import manifest_schema
from graphquant.batch.types import read_report

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def batch_of_three(tmp_path, monkeypatch):
    """Return a function that runs the command on three models, and returns exit code, stdout and stderr."""
    for name in ("digits_cnn", "digits_rnn", "digits_nested"):
        shutil.copy(ROOT / "sample_models" / f"{name}.onnx", tmp_path)
    tmp_path.joinpath("graphquant.toml").write_text('[defaults]\nrules = "weight_only"\n[[model]]\npath = "*.onnx"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments):
        result = invoke_cli("batch", *arguments)
        return result.exit_code, result.stdout, result.stderr

    return run


@pytest.mark.slow
def test_shards_equal_the_whole_batch(batch_of_three):
    """Outputs and merged report of all shards equal those of the whole batch."""
    code, _, _ = batch_of_three("--report", "whole.json", "-j", "1")
    assert code == 0
    whole = {path.name: path.read_bytes() for path in Path().glob("*.quant.onnx")}
    assert len(whole) == 3
    for path in Path().glob("*.quant.onnx"):
        path.unlink()
    for part in ("1/2", "2/2"):
        assert (
            batch_of_three("--shard", part, "--no-cache", "--force", "-j", "1", "--report", f"{part[0]}.json")[0] == 0
        )
    assert {path.name: path.read_bytes() for path in Path().glob("*.quant.onnx")} == whole
    shards = [read_report(Path(f"{number}.json")) for number in (1, 2)]
    assert sorted(len(shard.outcomes) for shard in shards) == [1, 2]
    assert [shard.shard for shard in shards] == [(1, 2), (2, 2)]
    assert shards[0].deal_digest == shards[1].deal_digest != ""
    assert batch_of_three("--merge", "1.json", "2.json", "--report", "merged.json")[0] == 0
    merged, plain = (report_without_times(read_report(Path(name))) for name in ("merged.json", "whole.json"))
    assert merged == plain


def test_names_that_are_not_utf8(batch_of_three):
    """A file name that is not UTF-8 is refused for that reason."""
    name = "m\udcff.onnx"
    code, _, errors = batch_of_three(name)
    assert code == 2
    assert repr(name) in errors
    assert "UTF-8" in errors


def test_schema_option(batch_of_three):
    """--schema prints the JSON schema of manifests."""
    code, output, _ = batch_of_three("--schema")
    assert (code, json.loads(output)) == (0, manifest_schema())


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--shard", "3/2"], "--shard 3/2"),
        (["--scheduler", "tcp://127.0.0.1:9", "-j", "2"], "--scheduler"),
        (["no.toml"], "no.toml"),
        (["--method", "minmx"], "'minmx'. Did you mean 'minmax'"),
        (["*.onx"], "'*.onx'"),
        (["--min-sqnr", "0"], "graphquant.toml:3: 'min_sqnr'"),
    ],
)
def test_invalid_arguments(batch_of_three, arguments, name):
    """Invalid arguments are rejected before any work starts, with the name or value in the message."""
    code, output, message = batch_of_three(*arguments)
    assert (code, output) == (2, "")
    assert name in message


def test_manifest_mistakes_are_usage_errors(batch_of_three):
    """Every mistake of a manifest is printed, and the exit code is 2."""
    Path("graphquant.toml").write_text("[[model]]\npath = 'x.onnx'\nrule = 'a'\nsamples = 0\n", "utf-8")
    code, _, message = batch_of_three()
    assert code == 2
    lines = [f"graphquant.toml:{number}" for number in (2, 3, 4)]
    assert [line.removeprefix("error: ").split(": ")[0] for line in message.strip().split("\n")] == lines


@pytest.mark.slow
def test_prune_cache_with_and_without_a_batch(batch_of_three):
    """--prune-cache prunes after the batch if there is one. Alone it only prunes, without options of a batch."""
    Path("graphquant.toml").write_text('[defaults]\nrules = "weight_only"\n[[model]]\npath = "digits_cnn.onnx"\n')
    code, out, err = batch_of_three("--prune-cache", "0d", "--report", "r.json", "-j", "1", "--format", "json")
    assert code == 0
    assert [outcome.status for outcome in read_report(Path("r.json")).outcomes] == ["done"]
    assert json.loads(out)["outcomes"][0]["status"] == "done"
    assert "Removed 1 outputs (" in err
    assert list(Path("cache/graphquant/batches").iterdir()) == []
    assert batch_of_three("--prune-cache", "soon")[0] == 2
    Path("graphquant.toml").unlink()
    assert batch_of_three("--prune-cache", "30d", "--report", "s.json")[0] == 2
    code, out, _ = batch_of_three("--prune-cache", "30d")
    assert (code, out) == (0, "Removed 0 outputs (0 bytes) from the cache.\n")
