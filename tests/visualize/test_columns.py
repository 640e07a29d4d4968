"""Output of every command without a terminal, at 80 columns."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest
from support.cli import command_output

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
    """Set 80 columns, and work in the folder of sample models."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.chdir(samples)


@pytest.fixture(scope="module")
def written_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with a quantized model and statistics."""
    folder = tmp_path_factory.mktemp("out")
    samples = Path(__file__).resolve().parents[2] / "sample_models"
    data = str(samples / "digits_cnn_calib.npz")
    result = gq.insert(samples / "digits_cnn.onnx", data=data, samples=8)
    result.save(folder / "quant.onnx")
    gq.calibrate(samples / "digits_cnn.onnx", data=data, samples=8).save(folder / "stats.gqs")
    return folder


def long_lines(text: str) -> list[str]:
    """Return the lines over 80 columns that consist of more than one name."""
    return [line for line in text.splitlines() if len(line) > WIDTH and len(line.split()) > 1]


def command_names() -> set[str]:
    """Return the name of each command, with those of command groups."""
    names = set()
    for name, command in main.commands.items():
        subcommands = command.commands if isinstance(command, click.Group) else {}
        names |= {f"{name} {subcommand}" for subcommand in subcommands} or {name}
    return names


@pytest.mark.parametrize("command", [line for line in COMMANDS.splitlines() if line])
def test_lines_are_short(command: str, narrow: None, written_folder: Path, cli: Callable[..., Any]) -> None:
    """No line exceeds 80 columns, ends with spaces or has a color."""
    arguments = shlex.split(command.replace("OUT", str(written_folder)), posix=False)
    output = command_output(*arguments).replace(str(written_folder), "OUT")
    assert output.strip()
    assert long_lines(output) == []
    assert not re.search(r"[ \t]+$", output, re.MULTILINE)


@pytest.mark.parametrize("verb", sorted(command_names()))
def test_help_is_short(verb: str, narrow: None, cli: Callable[..., Any]) -> None:
    """The help of each command fits in 80 columns."""
    assert long_lines(cli(*verb.split(), "--help").stdout) == []


def test_every_verb_is_covered() -> None:
    """Each command that prints tables or findings is in COMMANDS."""
    covered = {name for name in command_names() for line in COMMANDS.splitlines() if f"{line} ".startswith(f"{name} ")}
    assert command_names() - covered == {"batch", "freeze", "mcp", "rules check", "rules schema", "rules show"}


@pytest.mark.slow
def test_real_models(narrow: None, model_folder: Path, cli: Callable[..., Any]) -> None:
    """Long names of models of other tools are not wrapped, and all other lines are short."""
    for command, name in (
        ("inspect", "kws/kws_int8.tflite"),
        ("inspect", "mtcnn.pb"),
        ("plan", "silero_vad_16k_op15.onnx"),
        ("plan", "ultraface/version-RFB-320.onnx"),
        ("inspect", "qlstm_tract.onnx"),
    ):
        output = cli(command, model_folder / name).stdout.replace(str(model_folder), "FOLDER")
        assert long_lines(output) == []


def test_piped_output_is_not_wrapped(samples: Path, cli: Callable[..., Any]) -> None:
    """Without COLUMNS each site has one line, for grep and diff."""
    lines = cli("plan", samples / "digits_cnn.onnx").stdout.splitlines()
    sites = gq.plan(samples / "digits_cnn.onnx").sites
    assert all(
        any(line.startswith(f"{site.tensor} ") and str(site.uses[0]) in line for line in lines) for site in sites
    )
