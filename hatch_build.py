"""Compiles the kernel of histograms when graphquant is installed; where no C compiler works, numpy counts instead."""

from __future__ import annotations

import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

NAME = "graphquant.observers._fill"
SOURCE = "graphquant/observers/_fill.c"


def compiled(source: Path, folder: Path) -> Path | None:
    """Compiles the kernel into graphquant/observers below `folder`; None if that fails."""
    extension = Extension(
        NAME,
        [str(source)],
        extra_compile_args=[] if os.name == "nt" else ["-O3", "-ffp-contract=off"],  # as numpy rounds
        py_limited_api=True,
        optional=True,
    )
    command = build_ext(Distribution({"ext_modules": [extension]}))
    with tempfile.TemporaryDirectory() as scratch:
        command.build_lib, command.build_temp = str(folder), scratch
        command.ensure_finalized()
        made = Path(command.get_ext_fullpath(NAME))
        made.unlink(missing_ok=True)  # processes that have it open keep it
        command.run()
    return made if made.exists() else None


class Kernel(BuildHookInterface[Any]):
    """Adds the compiled kernel to wheels; for an editable installation puts it into the checkout, beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """A wheel with the kernel is one for this system, and for Python 3.11 and later ones."""
        self._scratch = tempfile.TemporaryDirectory()
        root = Path(self.root)
        made = compiled(root / SOURCE, root if version == "editable" else Path(self._scratch.name))
        if made is None:
            self.app.display_warning("No C compiler that works: numpy will count histograms, in three times the time.")
        elif version != "editable":
            build_data["force_include"][str(made)] = f"graphquant/observers/{made.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, *_: object) -> None:
        """Removes what the wheel was made of."""
        self._scratch.cleanup()
