"""Statistics on the command line: `inspect stats.gqs` and `inspect MODEL --stats stats.gqs`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import graphquant as gq

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def stats_folder(samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with statistics of the sample model, the current one."""
    monkeypatch.chdir(tmp_path)
    gq.calibrate(samples / "digits_cnn.onnx", data=str(samples / "digits_cnn_calib.npz")).save("stats.gqs")
    return tmp_path


def test_a_statistics_file(cli: Callable[..., Any], stats_folder: Path) -> None:
    """The file by itself is a table of its tensors, JSON data, or a page."""
    lines = cli("inspect", "stats.gqs").stdout.splitlines()
    assert lines[0].startswith("stats.gqs: ")
    assert re.findall(r"\b\d+ \w+", lines[0]) == ["13 tensors", "100 samples", "4 blocks"]
    assert lines[1].split() == ["tensor", "histogram", "seen", "values", "NaN", "inf"]
    assert lines[2].startswith("stem/conv__6:0")
    assert len(lines) == 16
    data = json.loads(cli("inspect", "stats.gqs", "--format", "json").stdout)
    assert [len(data["tensors"]), data["model"], data["stats"]] == [13, None, "stats.gqs"]
    result = cli("inspect", "stats.gqs", "--html", "stats.html")
    assert (result.stdout.splitlines(), result.stderr) == (lines, "Written to stats.html\n")
    assert Path("stats.html").read_text("utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.slow
def test_statistics_with_a_model(cli: Callable[..., Any], stats_folder: Path, samples: Path) -> None:
    """With a model, the table has the ranges; the page is reproducible; -o writes the table to a file."""
    model = samples / "digits_cnn.onnx"
    lines = cli("inspect", model, "--stats", "stats.gqs").stdout.splitlines()
    assert lines[1].split() == ["tensor", "histogram", "SQNR", "clipped", "range", "method", "seen", "type", "rule"]
    assert lines[2].startswith("residual_2/conv:0")
    assert " auto: minmax " in lines[2]
    cli("inspect", model, "--stats", "stats.gqs", "-o", "table.txt")
    assert Path("table.txt").read_text("utf-8").splitlines() == lines
    for name in ("one.html", "two.html"):
        cli("inspect", model, "--stats", "stats.gqs", "--html", name)
    assert Path("one.html").read_bytes() == Path("two.html").read_bytes()
    data = json.loads(cli("inspect", model, "--stats", "stats.gqs", "--format", "json").stdout)
    methods = {alternative["method"] for alternative in data["tensors"][0]["alternatives"]}
    assert methods >= {"auto", "entropy", "percentile"}
    assert [tensor["cost"]["sqnr"] for tensor in data["tensors"]] == sorted(
        tensor["cost"]["sqnr"] for tensor in data["tensors"]
    )


def test_rules_give_ranges(cli: Callable[..., Any], stats_folder: Path, samples: Path) -> None:
    """Other rules give other ranges; rules without activations give no ranges."""
    model = samples / "digits_cnn.onnx"
    assert "[-7.938, 7.938]" in cli("inspect", model, "--stats", "stats.gqs", "--rules", "fixed_point").stdout
    command = ("inspect", model, "--stats", "stats.gqs", "--rules", "weight_only")
    assert json.loads(cli(*command, "--format", "json").stdout)["tensors"] == []
    assert len(cli(*command).stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["stats.gqs", "--rules", "tflite"], ": graphquant inspect MODEL --stats stats.gqs"),
        (["stats.gqs", "--format", "dot"], "--format dot draws a model, "),
        (["stats.gqs", "--html", "a.html", "-o", "a.html"], "--html a.html is also "),
        (["stats.gqs", "--html", "stats.gqs"], "stats.gqs is the source"),
        (["MODEL", "--stats", "stats.gqs", "--force", "--html", "stats.gqs"], "stats.gqs is the source"),
        (["none.gqs"], "none.gqs"),
        (["MODEL", "--rules", "tflite"], "--stats FILE"),
        (["OTHER", "--stats", "stats.gqs"], "another model"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)
def test_refused_statistics_options(
    cli: Callable[..., Any], stats_folder: Path, samples: Path, arguments: list[str], said: str
) -> None:
    """Contradicting options are rejected, and no file is written."""
    names = {"MODEL": str(samples / "digits_cnn.onnx"), "OTHER": str(samples / "digits_rnn.onnx")}
    result = cli("inspect", *(names.get(argument, argument) for argument in arguments), code=2)
    assert said in result.stderr
    assert sorted(path.name for path in stats_folder.iterdir()) == ["stats.gqs"]
