"""The file of weights that is written beside a model: its name, which tells what it holds, and when it goes again."""

from __future__ import annotations

import hashlib
import re
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from graphquant.errors import ModelError
from graphquant.formats import SUFFIXES
from graphquant.formats.parts import has_external

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_NAME = re.compile(r"(?P<model>.+)\.[0-9a-f]{16}\.data")

_NONE = (".data", ".part")
"""What ends the names of weights, and of files that a killed process did not finish."""

_MAX_BYTES = 1 << 31
"""Of a model's own file, which is a protocol buffer."""


class Digested:
    """A file that is written from its start on, and the digest of what was.

    Args:
        file: The file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._found, self._size = file, hashlib.sha256(), 0

    def write(self, data: Any) -> None:
        """Writes bytes behind the last ones.

        Raises:
            OSError: They cannot be written.
        """
        self._size += self._file.write(data)
        self._found.update(data)

    def tell(self) -> int:
        """How many bytes were written."""
        return self._size

    @property
    def digest(self) -> str:
        """The hex SHA-256 of what was written."""
        return self._found.hexdigest()


def data_path(path: Path, digest: str) -> Path:
    """Where weights with this digest are that belong to the model at `path`."""
    return path.with_name(f"{path.name}.{digest[:16]}.data")


@contextmanager
def replacing(path: Path, *, apart: bool = False) -> Iterator[None]:
    """Around what writes a model to `path`: in the end weights go that were written for a model there and are nobody's.

    They are what the model had that was there before, or what a process left that was killed.

    Args:
        path: The model.
        apart: Whether the new one has weights of its own beside it.
    """
    looked = apart or (path.is_file() and has_external(path))
    try:
        yield
    finally:
        if looked:
            with suppress(OSError):  # it is there, with its weights
                for name in _unread(path):
                    path.with_name(name).unlink(missing_ok=True)


def _unread(path: Path) -> list[str]:
    """The files of weights that were written for a model at `path`, and that no model in its folder has."""
    names = [file.name for file in path.parent.iterdir()]
    left = set(written_for(path.name, names))
    left -= read_by([path]) if left else set()
    left -= read_by(path.with_name(name) for name in may_be_models(names)) if left else set()
    return sorted(left)


def written_for(model: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that are called like weights that were written for a model of this name."""
    found = ((name, _NAME.fullmatch(name)) for name in sorted(names))
    return [name for name, told in found if told is not None and told["model"] == model]


def may_be_models(names: Iterable[str]) -> list[str]:
    """Those of `names` that may be ONNX models, kept copies of models such as `net.onnx.bak` too."""
    return [
        name
        for name in sorted(names)
        if SUFFIXES.get(f".{name.rpartition('.')[2]}") == "onnx" or (".onnx" in name and not name.endswith(_NONE))
    ]


def read_by(paths: Iterable[Path]) -> set[str]:
    """Where these models have data beside them; what is no model has none."""
    return {name for path in paths for name in _names(path)}


def _names(path: Path) -> tuple[str, ...]:
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES or not has_external(path):
            return ()
        from graphquant.formats.onnx.files import external_names

        return external_names(path)
    except (ModelError, OSError):
        return ()
