"""Install graphquant with other versions of its dependencies, and run README's commands and the runtime tests.

Each environment is new. `lowest` has the lowest version that pyproject.toml allows of each direct dependency, `pinned`
those of constraints.txt, and `newest` the newest of everything, with the development tools, where README's second
command runs all tests. The others are `pinned` with another release of ONNX Runtime, and run the tests whose results
depend on it. `newest` and `1.30.0` have a later Python, if that is installed. A failure of `newest` is reported, but it
only counts if all its releases are as old as the pinned ones. An environment whose packages cannot be downloaded is
reported as not installed, and does not count either. As many environments are tested at once as there are cores::

    python .ci/matrix.py                 # all environments, then the table of docs/versions.md
    python .ci/matrix.py lowest 1.24.4   # some of them
    python .ci/matrix.py --skip pinned   # all others; `.ci/run` tests the pinned versions itself
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = "uv==0.13.9"
RUNTIMES = ("1.22.1", "1.24.4", "1.26.0", "1.28.0", "1.30.0", "1.31.1", "1.32.0")
PYTHONS = {"newest": "3.13", "1.30.0": "3.12"}
"""Python of these environments, if it is installed. The others have the Python that runs this script."""

EXTRAS = ("tensorflow", "data", "dask")
TOOLS = ("pytest", "hypothesis", "jsonschema", "pyyaml")
"""Packages that the tests below need, at their pinned versions unless the product's own dependencies choose others."""

UNDECLARED = "sympy==1.14.0"
"""Package that ONNX Runtime 1.26 imports in its quantizer, to which tests compare, and does not install."""

RUNTIME_TESTS = (
    "tests/backends/test_check.py", "tests/backends/test_oracle.py", "tests/backends/test_oracle_models.py",
    "tests/formats/onnx/test_runtime.py", "tests/formats/onnx/test_session.py", "tests/formats/onnx/test_runner.py",
    "tests/formats/onnx/test_observe.py", "tests/formats/onnx/test_conversions.py",
    "tests/formats/onnx/test_decoders.py", "tests/formats/onnx/test_fused_ops.py",
    "tests/qdq/test_onnx_types.py", "tests/qdq/test_onnx_widths.py", "tests/qdq/test_onnx_block_scales.py",
    "tests/quantize/test_kv_cache.py",
    "tests/api/test_float16.py", "tests/api/test_nested.py", "tests/api/test_validation.py", "tests/api/test_verbs.py",
    "tests/sample_models",
)  # fmt: skip
"""Tests whose results depend on the release of ONNX Runtime, which run in every environment: its optimizer, kernels,
sessions and types, and the accuracy of models. Those that load TensorFlow are the last, because releases before 1.28
fork for each session, which takes longer the more a process has loaded.
"""

OTHER_TESTS = ("tests/backends", "tests/formats/onnx", "tests/qdq", "tests/api", "tests/cli")
"""More tests that run ONNX Runtime or use the other dependencies, for `lowest`. `newest` runs all quick tests, as
README's second command does."""

UNREACHABLE = re.compile(
    "error sending request|Failed to fetch|name resolution|[Cc]onnection (reset|refused)|timeout|NewConnection"
)
"""Messages of uv and pip if the package index cannot be reached."""

DOWNLOADS = threading.Lock()
"""Held while an environment is installed, so that a package that several of them need is downloaded once."""

SHOWN = ("python", "onnxruntime", "onnx", "tensorflow", "protobuf", "numpy", "click", "pydantic")


def pinned() -> dict[str, str]:
    """Versions in constraints.txt."""
    text = ROOT.joinpath("constraints.txt").read_text("utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def requirements(environment: str) -> tuple[list[str], list[str]]:
    """Arguments for uv's resolver, and lines that are added to the constraints."""
    if environment == "lowest":
        return ["--resolution", "lowest-direct"], []
    if environment == "newest":
        return ["--upgrade"], []
    versions = pinned()
    if environment != "pinned":
        versions["onnxruntime"] = environment
    return [], [f"{name}=={version}" for name, version in versions.items()]


def test_tools(chosen: Path) -> list[str]:
    """Requirements of the tests, in addition to those in the file `chosen`."""
    names = set(re.findall(r"^([\w.-]+)==", chosen.read_text("utf-8"), re.MULTILINE))
    return [UNDECLARED, *(name if name in names else f"{name}=={pinned()[name]}" for name in TOOLS)]


def read_readme(kind: str) -> str:
    """Return README's commands, before the heading "Commands" (`setup`) or after it (`commands`)."""
    command = [sys.executable, ".ci/readme.py", kind]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def set_up_command(program: str) -> str:
    """Return the command in README's set-up that starts with these words. Raises a ValueError if there is none."""
    match = re.search(rf"{program} [^\n&]*", read_readme("setup"))
    if match is None:
        raise ValueError(f"README does not run {program}")
    return match[0]


def find_interpreter(environment: str) -> str | Path:
    """Path of the Python for an environment. A shim of pyenv on PATH need not run."""
    if version := PYTHONS.get(environment, ""):
        homes = Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")
        for candidate in (shutil.which(f"python{version}"), *sorted(homes)):
            if candidate and subprocess.run([candidate, "--version"], capture_output=True, check=False).returncode == 0:
                return candidate
    return sys.executable


def site_packages(python: Path) -> Path:
    """Folder of the packages of a virtual environment."""
    return next(python.parents[1].glob("lib/python*/site-packages"))


class Environment:
    """One virtual environment with a copy of the source. It may see the packages of another one, its base."""

    def __init__(self, name: str, folder: Path, uv: Path, base: Environment | None = None) -> None:
        self.name, self.folder, self.uv, self.base = name, folder / name, uv, base
        self.python = self.folder / "venv" / "bin" / "python"
        self.source = self.folder / "main"
        self.log = self.folder / "log.txt"
        self.chosen = self.folder / "requirements.txt"

    def run(self, *command: object, script: str | None = None) -> bool:
        """Run a command in the copy of the source, with its output in the log, and return its success."""
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        variables = os.environ | {"PATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTEST_ADDOPTS": "--fail-on-skips"}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)  # dozens of commands import the same packages
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {' '.join(map(str, command))}\n")
            log.flush()
            return not subprocess.run(
                [*map(str, command)], cwd=self.source, env=variables, stdout=log, stderr=log, input=script, text=True,
                check=False,
            ).returncode  # fmt: skip

    def copy_source(self) -> None:
        """Copy the checked-in files."""
        self.source.mkdir(parents=True)
        files = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\0")
        for name in filter(None, files):
            target = self.source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        shared = ROOT.parent / "shared"
        if shared.exists():
            self.folder.joinpath("shared").symlink_to(shared)

    def install(self) -> bool:
        """Copy the checked-in files, resolve the versions and install them."""
        return self.has_packages and self.run(
            self.uv, "pip", "install", "-q", "--python", self.python, "--no-deps", "-e", "."
        )

    @cached_property
    def has_packages(self) -> bool:
        """Install the packages once, and return the success."""
        return self.install_packages()

    def install_packages(self) -> bool:
        """Resolve the versions of all packages, and install those that differ from the base's."""
        if self.base and not self.base.has_packages:
            self.log = self.base.log
            return False
        self.copy_source()
        arguments, lines = requirements(self.name)
        constraints = self.folder / "constraints.txt"
        constraints.write_text("\n".join(lines), encoding="utf-8")
        names = (*EXTRAS, *(["dev"] if self.name == "newest" else []))
        extras = [argument for extra in names for argument in ("--extra", extra)]
        install = (self.uv, "pip", "install", "-q", "--python", self.python)
        if not (
            self.run(self.uv, "venv", "-q", "--python", find_interpreter(self.name), self.folder / "venv")
            and self.run(self.uv, "pip", "compile", "-q", "--no-header", "--no-annotate", *arguments,
                         "--constraint", constraints, "--python", self.python, "pyproject.toml", *extras,
                         "-o", self.chosen)
        ):  # fmt: skip
            return False
        if self.base is None:
            return self.run(*install, "-r", self.chosen) and self.run(
                *install, "-c", self.chosen, *test_tools(self.chosen)
            )
        site_packages(self.python).joinpath("base.pth").write_text(str(site_packages(self.base.python)), "utf-8")
        known = set(self.base.chosen.read_text("utf-8").splitlines())
        return self.run(*install, "--no-deps", *sorted(set(self.chosen.read_text("utf-8").splitlines()) - known))

    def versions(self) -> dict[str, str]:
        """Versions of Python and of all installed packages."""
        if not self.python.exists():
            return {}
        listing = subprocess.run(
            [self.uv, "pip", "freeze", "--python", self.python], capture_output=True, text=True, check=False
        ).stdout
        python = subprocess.run([self.python, "--version"], capture_output=True, text=True, check=False).stdout
        return (
            (self.base.versions() if self.base else {})
            | {"python": python.removeprefix("Python ").strip()}
            | dict(re.findall(r"^([\w.-]+)==(\S+)", listing, re.MULTILINE))
        )

    def commands(self) -> bool:
        """Run the commands of README, and the main job of its set-up."""
        return self.run_script(f"{set_up_command('graphquant insert')}\n{read_readme('commands')}")

    def tests(self) -> bool:
        """Run the tests, and insert all rule files into small graphs."""
        paths = (*RUNTIME_TESTS, *(OTHER_TESTS if self.name == "lowest" else ()))
        if self.name == "newest":
            passed = self.run_script(set_up_command("pytest"))
        else:
            passed = self.run(self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths)
        return passed & self.run(self.python, "-W", "ignore", "benchmarks/opsets.py", "--opsets", 17)

    def run_script(self, script: str) -> bool:
        """Run lines of the shell, which end at the first error, and return their success."""
        return self.run("bash", "-euo", "pipefail", script=script)

    def summary(self) -> str:
        """Last line of the tests' output."""
        lines = self.log.read_text("utf-8").splitlines()
        return next((line for line in reversed(lines) if re.search(r"\d (passed|failed|error)", line)), "")


def is_newer(versions: dict[str, str]) -> list[str]:
    """Names of packages whose installed release is newer than the pinned one."""

    def key(version: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", version)]

    return [
        f"{name} {versions[name]}" for name, version in pinned().items() if key(versions.get(name, "0")) > key(version)
    ]


def check_environment(name: str, *, folder: Path, uv: Path, base: Environment) -> tuple[list[str], bool]:
    """Install and test one environment; return its row of the table, and False if a failure counts."""
    start = time.monotonic()
    is_layer = name in RUNTIMES and name not in PYTHONS  # with the Python of the base
    environment = Environment(name, folder, uv, base if is_layer else None)
    with DOWNLOADS:
        steps = {"install": environment.install()}
    if steps["install"]:
        steps |= {"README": environment.commands(), "tests": environment.tests()}
    versions = environment.versions()
    allowed = is_newer(versions) if name == "newest" else []
    good = all(steps.values())
    log = environment.log.read_text("utf-8")
    unreachable = not steps["install"] and UNREACHABLE.search(log) is not None
    result = "passes" if good else "not installed" if unreachable else "fails"
    lines = [f"{name}: {result}, {time.monotonic() - start:.0f} s, {environment.summary()}"]
    if not good:
        failures = ", ".join(step for step, passed in steps.items() if not passed)
        lines = [log[-20000:], f"-- {name}: {failures} failed", *lines]
    if unreachable:
        lines.append("-- the package index cannot be reached, so it does not count")
    elif not good and allowed:
        lines.append(f"-- newer than constraints.txt, so it does not count: {', '.join(allowed)}")
    print("\n".join(lines), flush=True)
    shutil.rmtree(environment.folder)
    return [name, *(versions.get(package, "-") for package in SHOWN), result], good or unreachable or bool(allowed)


def main() -> None:
    """Test the chosen environments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["lowest", "pinned", "newest", *(name for name in RUNTIMES if name != pinned()["onnxruntime"])]
    parser.add_argument("environments", nargs="*", default=names)
    parser.add_argument("--skip", action="append", default=[], choices=names)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        boot = Path(folder) / "boot"
        venv.create(boot, with_pip=True)
        installed = subprocess.run([boot / "bin" / "pip", "install", UV], capture_output=True, text=True, check=False)
        if installed.returncode:
            print(f"{installed.stdout}{installed.stderr}-- {UV} cannot be installed, so no environment was tried")
            sys.exit(UNREACHABLE.search(installed.stdout + installed.stderr) is None)
        uv = boot / "bin" / "uv"
        test = partial(
            check_environment, folder=Path(folder), uv=uv, base=Environment("pinned", Path(folder) / "base", uv)
        )
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            outcomes = list(pool.map(test, [name for name in arguments.environments if name not in arguments.skip]))
    header = ["environment", *SHOWN, "result"]
    for row in (header, ["---"] * len(header), *(row for row, _ in outcomes)):
        print(f"| {' | '.join(row)} |")
    sys.exit(not all(passed for _, passed in outcomes))


if __name__ == "__main__":
    main()
