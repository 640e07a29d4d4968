"""Fixtures of all tests: sample models, a browser, and the command line."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from support.cli import run_cli
from support.onnx_models import WRONG_PRODUCTS
from support.plans import disable_costs
from support.shared_models import NO_SHARED_MODELS, SHARED_MODELS

from graphquant.formats import format_module
from graphquant.utils import disable_onednn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[1]

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

disable_onednn()  # before any test imports TensorFlow

# Else each of the many programs that tests start compiles the whole package, as long as its imports take.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

settings.register_profile("any machine", deadline=None)  # a shared machine may be slow
settings.load_profile("any machine")

# Many CI systems start programs with SIGINT ignored, and every child process inherits that. The tests of Ctrl-C need a
# handler; a function is replaced by the default action in children.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


ALLOWED_SKIPS = (
    *(NO_SHARED_MODELS, WRONG_PRODUCTS),
    *(
        "this release has no MoE for CPUs",
        "this release folds no weights of 4 bits",
        "this release has no tables of bytes",
        "this release of onnxruntime has no int8 caches",
    ),
    *("mounting needs root", "mounting is not permitted"),
)
"""Reasons for which a test may be skipped with `--fail-on-skips`: the rest can be installed everywhere."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that CI sets."""
    parser.addoption(
        "--fail-on-skips", action="store_true", help="Fail if a test is skipped for a reason that is not listed."
    )


class SkipCheck:
    """Fails a session in which tests were skipped for reasons that are not listed."""

    def __init__(self) -> None:
        self.unlisted: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that was skipped for another reason."""
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            if not any(allowed in reason for allowed in ALLOWED_SKIPS):
                self.unlisted.append(f"{report.nodeid}: {reason}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module that was skipped for another reason."""
        self.pytest_runtest_logreport(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the session."""
        if self.unlisted and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """List the tests."""
        for line in self.unlisted:
            terminalreporter.write_line(f"skipped for a reason that is not listed: {line}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    """Check the reasons of skipped tests, in the process that reports them."""
    if config.getoption("--fail-on-skips") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipCheck())


@pytest.fixture(autouse=True)
def unfolded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove COLUMNS from the environment, which pytest-xdist sets for its workers and which would wrap output."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session")
def samples() -> Path:
    """Return the folder of sample models."""
    return ROOT / "sample_models"


@pytest.fixture(scope="session")
def tf() -> Any:
    """Return TensorFlow, imported as graphquant's runner imports it."""
    pytest.importorskip("tensorflow")
    tensorflow_format = format_module("tensorflow")
    tensorflow_format.create_runner(tensorflow_format.load(ROOT / "sample_models" / "digits_cnn.pb"))
    return sys.modules["tensorflow"]


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of real models outside of the repository. Skips the test if it does not exist."""
    if not SHARED_MODELS.is_dir():
        pytest.skip(NO_SHARED_MODELS)
    return SHARED_MODELS


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with small models at the paths of shared ones."""
    from support.stand_ins import write_stand_ins  # imports ONNX, which few tests need

    return write_stand_ins(tmp_path_factory.mktemp("stand_ins"), ROOT / "sample_models")


@pytest.fixture(scope="session", params=["stand-in", "real"])
def model_folder(request: pytest.FixtureRequest) -> Path:
    """Return the folder of small models, then that of real ones."""
    return request.getfixturevalue({"stand-in": "stand_ins", "real": "shared"}[request.param])


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Start an installed Chromium with playwright, which renders in software."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip("no Chromium is installed")
    with driver.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def cli() -> Callable[..., Any]:
    """Return a function that calls graphquant in this process and checks its exit code."""
    return run_cli


@pytest.fixture
def rules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the rules decide what is quantized, also in small models, where int8 does not pay."""
    disable_costs(monkeypatch)
