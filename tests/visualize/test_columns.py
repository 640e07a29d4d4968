"""The output of every verb, where it is no terminal, at 80 columns."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest

import graphquant as gq
from graphquant.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH = 80

COMMANDS = """
plan digits_cnn.onnx
plan digits_cnn.onnx --rules tensorrt
plan digits_rnn.onnx
plan digits_nested.onnx
plan digits_cnn.pb
plan digits_cnn_saved_model
plan digits_rnn_saved_model
inspect digits_cnn.onnx
inspect digits_cnn_bn.onnx
inspect digits_rnn.pb
inspect digits_nested.onnx
inspect OUT/quant.onnx
inspect OUT/quant.onnx --around stem/conv
inspect OUT/stats.gqs
inspect digits_cnn.onnx --stats OUT/stats.gqs
explain digits_cnn.onnx stem/conv
explain digits_cnn.onnx stem/conv --all
explain digits_rnn.onnx *
explain OUT/quant.onnx *
insert digits_cnn.onnx --data digits_cnn_calib.npz --samples 8 --dry-run
insert digits_nested.onnx --data digits_nested_calib.npz --samples 4 --dry-run
insert digits_cnn.pb --rules weight_only --dry-run
calibrate digits_cnn.onnx --data digits_cnn_calib.npz --samples 4 -o OUT/again.gqs
check OUT/quant.onnx
check OUT/quant.onnx --for onnxruntime
check OUT/quant.onnx --for tensorrt
compare digits_cnn.onnx OUT/quant.onnx --data digits_cnn_eval.npz --samples 8 --top 0
diff digits_cnn.onnx OUT/quant.onnx
strip OUT/quant.onnx --check digits_cnn.onnx
data check digits_cnn.onnx digits_cnn_calib.npz
rules list
"""
"""Run in the folder of sample models; OUT is a folder that has quant.onnx and stats.gqs."""


@pytest.fixture
def narrow(samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns, in the folder of sample models."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.chdir(samples)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a quantized model and statistics."""
    folder = tmp_path_factory.mktemp("out")
    samples = Path(__file__).resolve().parents[2] / "sample_models"
    data = str(samples / "digits_cnn_calib.npz")
    result = gq.insert(samples / "digits_cnn.onnx", data=data, samples=8)
    result.save(folder / "quant.onnx")
    gq.calibrate(samples / "digits_cnn.onnx", data=data, samples=8).save(folder / "stats.gqs")
    return folder


def too_long(text: str) -> list[str]:
    """The lines of more than 80 columns that could be shorter: those that are more than one name."""
    return [line for line in text.splitlines() if len(line) > WIDTH and len(line.split()) > 1]


def names_of_verbs() -> set[str]:
    """What can be asked of graphquant: each command, and each of a group's."""
    found = set()
    for name, command in main.commands.items():
        inner = command.commands if isinstance(command, click.Group) else {}
        found |= {f"{name} {each}" for each in inner} or {name}
    return found


@pytest.mark.parametrize("command", [line for line in COMMANDS.splitlines() if line])
def test_lines_are_short(command: str, narrow: None, out: Path, cli: Callable[..., Any]) -> None:
    """No line is longer than 80 columns, none ends with spaces, and none has a color."""
    arguments = shlex.split(command.replace("OUT", str(out)), posix=False)
    shown = main_output(cli, arguments).replace(str(out), "OUT")
    assert shown.strip()
    assert too_long(shown) == []
    assert not re.search(r"[ \t]+$", shown, re.MULTILINE)


def main_output(cli: Callable[..., Any], arguments: list[str]) -> str:
    """What a command prints, whatever it finds."""
    for code in (0, 1):
        try:
            return str(cli(*arguments, code=code).stdout)
        except AssertionError:
            if code:
                raise
    return ""


@pytest.mark.parametrize("verb", sorted(names_of_verbs()))
def test_help_is_short(verb: str, narrow: None, cli: Callable[..., Any]) -> None:
    """What --help says of each verb fits too."""
    assert too_long(cli(*verb.split(), "--help").stdout) == []


def test_every_verb_is_here() -> None:
    """A verb that prints a table or findings is run above; the others print files or run the rest."""
    run = {name for name in names_of_verbs() for line in COMMANDS.splitlines() if f"{line} ".startswith(f"{name} ")}
    assert names_of_verbs() - run == {"batch", "rules check", "rules schema", "rules show"}


def test_the_real_models(narrow: None, shared: Path, cli: Callable[..., Any]) -> None:
    """Deep names and TFLite's long ones stay whole, and all else is short."""
    for command, name in (
        ("inspect", "kws/kws_int8.tflite"),
        ("inspect", "mtcnn.pb"),
        ("plan", "silero_vad_16k_op15.onnx"),
        ("plan", "ultraface/version-RFB-320.onnx"),
        ("inspect", "qlstm_tract.onnx"),
    ):
        shown = cli(command, shared / name).stdout.replace(str(shared), "SHARED")
        assert too_long(shown) == []


def test_a_pipe_is_not_folded(samples: Path, cli: Callable[..., Any]) -> None:
    """Without COLUMNS each site has a line of its own, for grep and diff."""
    lines = cli("plan", samples / "digits_cnn.onnx").stdout.splitlines()
    sites = gq.plan(samples / "digits_cnn.onnx").sites
    assert all(
        any(line.startswith(f"{site.tensor} ") and str(site.uses[0]) in line for line in lines) for site in sites
    )
