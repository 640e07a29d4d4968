"""Outputs by what they were made of, so that nothing is made twice; and the folder where they and all else are kept."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from graphquant.batch.ingredients import file_digest
from graphquant.batch.journal import remove_journals
from graphquant.batch.types import Outcome, outcome_from, outcome_json
from graphquant.data.files import remote
from graphquant.errors import UsageError
from graphquant.formats.beside import replacing
from graphquant.whole import room_beside, take_place, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_CHUNK = 1 << 20
_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}
_AGE = re.compile(r"(\d{1,5})\s*([hdw])", re.IGNORECASE)
_MONTH = 30 * 86400
_SHA256 = re.compile("[0-9a-f]{64}")


def default_folder() -> Path:
    """The user's folder for caches, as the system has it."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "graphquant"


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of outcomes by their key, and of the files of outputs by their digest.

    Attributes:
        folder: The folder, made when something is put there.
    """

    folder: Path

    def outcome(self, key: str) -> Outcome | None:
        """The outcome that was kept under `key`, None if there is none that can be read."""
        path = self._outcome(key)
        found = _read(path)
        if found is not None:
            with suppress(OSError):
                os.utime(path)  # pruning goes by the last use
        return found

    def keep(self, outcome: Outcome) -> None:
        """Keeps an output, whose files are where the outcome says, and the outcome under its key; no files elsewhere.

        Raises:
            OSError: The folder is full, or cannot be written.
        """
        home = Path(outcome.output).parent
        for name, digest in outcome.products.items():
            path = self._object(digest)
            if not remote(outcome.output) and not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                _copy(home / name, path, digest)
        path = self._outcome(outcome.digests.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as file:
            file.write(json.dumps(outcome_json(outcome)).encode())

    def forget(self, key: str) -> None:
        """Removes the outcome under `key`, if there is one."""
        with suppress(OSError):
            self._outcome(key).unlink()

    def restore(self, outcome: Outcome, output: Path) -> bool:
        """Writes a kept output, whole or not at all; False if it is not there in full any more.

        Raises:
            OSError: It cannot be written.
        """
        home, names = output.parent, {PurePosixPath(name): digest for name, digest in outcome.products.items()}
        if not all(self._object(digest).is_file() for digest in names.values()):
            return False
        beside = {name: digest for name, digest in names.items() if name.parts[0] != output.name}
        if any((home / name).exists() and file_digest(home / name) != digest for name, digest in beside.items()):
            return False  # another model's data; who makes the output anew finds words for that
        home.mkdir(parents=True, exist_ok=True)
        room = room_beside(output)
        try:
            for name, digest in names.items():
                (room / name).parent.mkdir(parents=True, exist_ok=True)
                if not _copy(self._object(digest), room / name, digest):
                    self._object(digest).unlink(missing_ok=True)  # it is damaged
                    return False
            with replacing(output, apart=bool(beside)):
                for name in beside:
                    (home / name).parent.mkdir(parents=True, exist_ok=True)
                    (room / name).replace(home / name)
                take_place(room / output.name, output, room)
        finally:
            shutil.rmtree(room, ignore_errors=True)
        return True

    def prune(self, limit: str) -> tuple[int, int]:
        """Removes what was not used for an age, "30d", or what was not used longest, down to a size, "2GB".

        Journals of that age go too; a month old where a size is given.

        Returns:
            How many outputs went, and how many bytes.

        Raises:
            UsageError: `limit` is neither.
        """
        age, size = parse_limit(limit)
        kept = sorted(self._outcomes(), key=lambda path: (-path.stat().st_mtime_ns, path.name))
        if size is None:
            staying = [path for path in kept if path.stat().st_mtime >= time.time() - age]
        else:
            staying = self._within(kept, size)
        for path in set(kept) - set(staying):
            path.unlink(missing_ok=True)
        needed = {digest for path in staying for digest in self._products(path)}
        freed = 0
        for path in self._objects():
            if path.name not in needed:
                freed += path.stat().st_size
                path.unlink(missing_ok=True)
        remove_journals(self.folder, age)
        return len(kept) - len(staying), freed

    def _within(self, kept: list[Path], size: int) -> list[Path]:
        """The first of `kept` whose files come to no more than `size` bytes together."""
        staying, counted = [], set[str]()
        for path in kept:
            for digest in self._products(path):
                if digest not in counted:
                    counted.add(digest)
                    with suppress(OSError):
                        size -= self._object(digest).stat().st_size
            if size < 0:
                break
            staying.append(path)
        return staying

    def _products(self, path: Path) -> list[str]:
        """The digests of an outcome's files."""
        found = _read(path)
        return [] if found is None else list(found.products.values())

    def _outcome(self, key: str) -> Path:
        return self.folder / "outcomes" / key[:2] / f"{key}.json"

    def _object(self, digest: str) -> Path:
        return self.folder / "files" / digest[:2] / digest

    def _outcomes(self) -> Iterator[Path]:
        return (self.folder / "outcomes").glob("*/*.json")

    def _objects(self) -> Iterator[Path]:
        return (path for path in (self.folder / "files").glob("*/*") if path.is_file())


def parse_limit(limit: str) -> tuple[int, int | None]:
    """The seconds that "30d" stands for, and None; or those of a month, and the bytes that "2GB" stands for.

    Raises:
        UsageError: `limit` is neither.
    """
    from graphquant.calibration import parse_size

    age = _AGE.fullmatch(limit.strip())
    return (int(age[1]) * _SECONDS[age[2].lower()], None) if age else (_MONTH, parse_size(limit))


def _copy(source: Path, target: Path, digest: str) -> bool:
    """Copies a file, whole or not at all; whether it is the one with that digest."""
    found = hashlib.sha256()
    with source.open("rb") as opened, whole(target) as file:
        while chunk := opened.read(_CHUNK):
            found.update(chunk)
            file.write(chunk)
    if found.hexdigest() != digest:
        target.unlink()
        return False
    return True


def _read(path: Path) -> Outcome | None:
    """The outcome in a file, None if it holds none: who fills a cache that several share is not known."""
    try:
        found = outcome_from(json.loads(path.read_bytes()), str(path))
    except (OSError, ValueError, RecursionError, UsageError):
        return None
    return found if found.digests.key == path.stem and _sound(found.products) else None


def _sound(products: Mapping[str, str]) -> bool:
    """Whether there are files, with digests that are such and names under the output's folder, as they become paths."""
    return bool(products) and all(
        _SHA256.fullmatch(digest)
        and PurePosixPath(name).parts
        and not Path(name).is_absolute()
        and ".." not in Path(name).parts
        for name, digest in products.items()
    )


__all__ = ["Cache", "default_folder", "parse_limit"]
