"""Help and completion of the command line: groups, examples, known names."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

from graphquant.backends import BACKENDS
from graphquant.cli import main
from graphquant.cli.options import OPTION_GROUPS, GroupedCommand
from graphquant.observers import OBSERVERS
from graphquant.optimize.algorithms import POST_CALIBRATION_ALGORITHMS, PRE_CALIBRATION_ALGORITHMS
from graphquant.qdq import FAMILIES
from graphquant.rules import shipped_rule_files
from graphquant.utils.options import ALGORITHM_NAMES, BACKEND_NAMES, FAMILY_NAMES, METHOD_NAMES, RULE_NAMES

DOCS = Path(__file__).parents[2] / "docs"
GROUPED = [name for name, command in main.commands.items() if isinstance(command, GroupedCommand)]


def test_names_are_those_of_the_tables() -> None:
    """The names in help and completion are those of the tables, with the observers that need no argument."""
    assert sorted(RULE_NAMES) == sorted(shipped_rule_files())
    assert tuple(FAMILIES) == FAMILY_NAMES
    assert tuple(name for name in OBSERVERS if name not in {"fixed", "fixed-point", "bias"}) == METHOD_NAMES
    assert (*PRE_CALIBRATION_ALGORITHMS, *POST_CALIBRATION_ALGORITHMS) == ALGORITHM_NAMES
    assert tuple(BACKENDS) == BACKEND_NAMES


def test_groups_have_each_option() -> None:
    """Each option of a command with groups is in exactly one of them."""
    grouped = [name for names in OPTION_GROUPS.values() for name in names]
    used = set()
    for name in GROUPED:
        command = main.commands[name]
        options = {param.name for param in command.params if isinstance(param, click.Option)}
        assert options <= set(grouped), name
        used |= options
    assert sorted(grouped) == sorted(used)


@pytest.mark.parametrize("name", GROUPED)
def test_examples_are_valid(name: str) -> None:
    """Each example in the help of a command has valid options."""
    epilog = main.commands[name].epilog.replace("\\\n", " ")  # continued lines
    lines = [line.split(maxsplit=2) for line in epilog.splitlines() if "graphquant" in line]
    assert lines
    for _, command, *arguments in lines:
        assert command == name
        main.commands[name].make_context(name, shlex.split(*arguments) if arguments else [])


@pytest.mark.parametrize(
    ("arguments", "incomplete", "names"),
    [
        (["insert", "m.onnx", "--method"], "m", ["minmax", "mean-minmax", "mse"]),
        (["insert", "m.onnx", "--algorithm"], "bias", ["bias-correction"]),
        (["insert", "m.onnx", "--rules"], "qn", ["qnn", "qnn16"]),
        (["insert", "m.onnx", "--optimize"], "", ["macs", "size", "latency"]),
        (["check", "m.onnx", "--for"], "onnx", ["onnxruntime", "onnxruntime-arm"]),
        (["explain", "m.onnx", "x", "--for"], "v", ["vitis_ai"]),
        (["rules", "show"], "tens", ["tensorrt"]),
    ],
)
def test_completion_suggests_names(arguments: list[str], incomplete: str, names: list[str]) -> None:
    """Completion suggests the names that continue the text."""
    items = ShellComplete(main, {}, "graphquant", "_GRAPHQUANT_COMPLETE").get_completions(arguments, incomplete)
    assert [item.value for item in items if item.type == "plain"] == names


@pytest.mark.parametrize("option", ["--rules", "--data", "--plan"])
def test_completion_allows_files(option: str) -> None:
    """The shell completes files for options that take one."""
    items = ShellComplete(main, {}, "graphquant", "_GRAPHQUANT_COMPLETE").get_completions(["insert", option], "x")
    assert [item.type for item in items] == ["file"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_documented_completion(shell: str) -> None:
    """The command of the documentation prints the completion of the shell, which calls graphquant for suggestions."""
    text = (DOCS / "commands.md").read_text("utf-8")
    (variable,) = re.findall(rf"(_\w+)={shell}_source graphquant", text)
    program = [sys.executable, "-m", "graphquant"]
    environment = {**os.environ, variable: f"{shell}_source"}
    script = subprocess.run(program, env=environment, capture_output=True, text=True, check=True).stdout
    assert f"{variable}={shell}_complete" in script


def test_existing_output_is_reported_last(cli: Callable[..., Any], samples: Path, tmp_path: Path) -> None:
    """Wrong models, rules and data are reported before an output that exists, and it stays as it is."""
    model, output = samples / "digits_cnn.onnx", tmp_path / "out.onnx"
    output.write_bytes(b"mine")
    mistakes = [
        (["missing.onnx"], "missing.onnx", 3),
        ([str(model), "--rules", "nosuch"], "nosuch", 2),
        ([str(model), "--exclude", "nosuch"], "nosuch", 2),
        ([str(model), "--data", "nosuch.npz"], "nosuch.npz", 2),
        ([str(model), "--data", "random:8"], str(output), 2),
    ]
    for arguments, named, code in mistakes:
        result = cli("insert", *arguments, "-o", str(output), code=code)
        assert named in result.stderr.splitlines()[0]
    assert output.read_bytes() == b"mine"
