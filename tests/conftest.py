"""What the tests of the whole program share: sample models and a way to call the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from hypothesis import settings

from graphquant.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("any machine", deadline=None)  # a machine that others use too may take its time
settings.load_profile("any machine")


@pytest.fixture
def samples() -> Path:
    """The folder of sample models."""
    return ROOT / "sample_models"


@pytest.fixture
def shared() -> Path:
    """The folder of real models that are no part of the project; the test is skipped where there is none."""
    folder = ROOT.parent / "shared" / "models"
    if not folder.is_dir():
        pytest.skip("the shared models are not here")
    return folder


@pytest.fixture
def cli() -> Callable[..., Any]:
    """A function that calls graphquant in this process and checks its exit code and that no traceback is ours."""

    def call(*arguments: object, code: int = 0) -> Any:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code == code, result.stderr
        assert "Traceback" not in result.stderr
        assert "\x1b" not in result.output
        return result

    return call
