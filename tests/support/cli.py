"""Call the command line in this process."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from click.testing import CliRunner

from graphquant.cli import main

if TYPE_CHECKING:
    from click.testing import Result


# Before click 8.2, standard error is only kept apart on request.
SEPARATE: dict[str, Any] = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}


def invoke_cli(*arguments: object) -> Result:
    """Call graphquant and return click's result, whatever the exit code."""
    return CliRunner(**SEPARATE).invoke(main, [str(argument) for argument in arguments])


def command_output(*arguments: object) -> str:
    """Return the output of a command that ends with 0, or with 1 for findings."""
    result = invoke_cli(*arguments)
    assert result.exit_code in {0, 1}, result.stderr
    return result.stdout


def run_cli(*arguments: object, code: int = 0) -> Result:
    """Call graphquant, and check its exit code and that it prints neither tracebacks nor terminal escapes."""
    result = invoke_cli(*arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.stderr
    assert "Traceback" not in result.stderr
    assert "\x1b" not in result.output
    return result
