"""What a process that was killed left beside the output that it was about to write."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_PART = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)\.[0-9a-f]{8}\.part")
"""As `graphquant.whole` calls a file that it has not finished."""

_ROOM = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)\.[a-z0-9_]{8}")
"""As it calls the folder in which a SavedModel is made ready."""


def sweep(outputs: Iterable[str]) -> None:
    """Removes unfinished files of processes that are gone; a folder that was just being replaced is put back."""
    homes: dict[Path, set[str]] = {}
    for output in outputs:
        homes.setdefault(Path(output).parent, set()).add(Path(output).name)
    for home, names in homes.items():
        with suppress(OSError):  # there is no such folder, or nothing may be removed from it
            for path in list(home.iterdir()):
                _swept(path, names)


def _swept(path: Path, names: set[str]) -> None:
    part, room = _PART.fullmatch(path.name), _ROOM.fullmatch(path.name)
    told = part or room
    if told is None or _lives(int(told["process"])):
        return
    if part and {part["name"], part["name"].rpartition(".")[0]} & names:
        path.unlink()
    elif room and room["name"] in names and path.is_dir() and not path.is_symlink():
        output = path.with_name(room["name"])
        if (path / "old").exists() and not output.exists():
            (path / "old").replace(output)
        shutil.rmtree(path, ignore_errors=True)


def _lives(process: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # it is somebody else's
    return True


__all__ = ["sweep"]
