"""Models and outputs elsewhere, read and written by fsspec: brought here, worked on as files, and sent back whole."""

from __future__ import annotations

import hashlib
import posixpath
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from graphquant.data.files import INSTALL, remote
from graphquant.errors import GraphQuantError, MissingDependencyError, ModelError, UsageError
from graphquant.formats.beside import may_name, unnamed, written_for
from graphquant.formats.parts import names_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from graphquant.batch.types import Entry, Outcome

MAX_FETCHED = 1 << 30
"""Bytes of files beside an output that are fetched to see whether they still name its old weights."""


def is_elsewhere(entry: Entry) -> bool:
    """Whether the model, its statistics or the output are not on this machine; data is read where it is."""
    return any(remote(path) for path in (entry.model, entry.stats or "", entry.output))


def through(entry: Entry, make: Callable[[Entry], Outcome]) -> Outcome:
    """The outcome of an entry some of whose files are elsewhere, by `make`, which is given one that is all here.

    Raises:
        MissingDependencyError: fsspec, or what it needs for a service, is not installed.
        ModelError: A file cannot be read.
        UsageError: The output cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="graphquant-") as made:
        room = Path(made)
        here = replace(
            entry,
            model=_fetched(entry.model, room / "model"),
            stats=None if entry.stats is None else _fetched(entry.stats, room / "stats"),
            output=str(room / "output" / posixpath.basename(entry.output)) if remote(entry.output) else entry.output,
        )
        outcome = make(here)
        if remote(entry.output) and outcome.products:
            _send(room / "output", outcome.products, entry.output)
    problem = outcome.problem
    if problem is not None:
        says = problem.says
        for path, address in ((here.model, entry.model), (here.output, entry.output), (here.stats, entry.stats)):
            says = says.replace(path or "\0", address or "")
        problem = replace(problem, says=says)
    return replace(outcome, model=entry.model, output=entry.output, problem=problem)


def exists(address: str) -> bool:
    """Whether there is something at an address.

    Raises:
        UsageError: Nobody can tell.
    """
    with _asking(address, UsageError, "looked at") as (system, path):
        return bool(system.exists(path))


def look(address: str, products: Collection[str]) -> str:
    """What tells one state of an output from another without reading it, "" if a file of it is missing.

    Raises:
        UsageError: Nobody can tell.
    """
    told = hashlib.sha256()
    with _asking(address, UsageError, "looked at") as (system, path):
        home = posixpath.dirname(path)
        for name in sorted(products):
            if not system.isfile(f"{home}/{name}"):
                return ""
            told.update(f"{name}\n{system.ukey(f'{home}/{name}')}\n".encode(errors="surrogatepass"))
    return told.hexdigest()


def _fetched(address: str, room: Path) -> str:
    """The path of what is at an address, with all files of a model, copied into `room`; a path as it is."""
    if not remote(address):
        return address
    with _asking(address, ModelError, "read") as (system, path):
        home, name = posixpath.split(path.rstrip("/"))
        room.mkdir()
        if system.isdir(path):
            for file in system.find(path):
                _fetch(system, home, posixpath.relpath(file, home), room)
        else:
            _fetch(system, home, name, room)
            there = [posixpath.basename(file) for file in system.ls(home, detail=False)]
            for beside in names_beside(room / name, there):
                if system.isfile(f"{home}/{beside}"):  # what is not there is told by whoever loads the model
                    _fetch(system, home, beside, room)
    return str(room / name)


def _fetch(system: Any, home: str, name: str, room: Path) -> None:
    if ".." in PurePosixPath(name).parts:
        raise ModelError(f"{home}/{name} leads out of the model's folder. Take it out.")
    (room / name).parent.mkdir(parents=True, exist_ok=True)
    system.get_file(f"{home}/{name}", str(room / name))


def _send(room: Path, names: Collection[str], address: str) -> None:
    """Writes the files of an output beside an address, all together where the service can; old ones of it go.

    A file that others read, as a model its weights, comes last.
    """
    with _asking(address, UsageError, "written") as (system, path):
        home, own = posixpath.split(path)
        for name in names:
            system.makedirs(posixpath.dirname(f"{home}/{name}"), exist_ok=True)
        with system.transaction:
            for name in sorted(names, key=lambda name: name == own):
                with (room / name).open("rb") as file, system.open(f"{home}/{name}", "wb") as there:
                    shutil.copyfileobj(file, there)
        if (room / own).is_dir():
            for file in system.find(path):
                if posixpath.relpath(file, home) not in names:
                    system.rm_file(file)
        elif len(names) > 1:
            _forget_weights(system, path, names, room.with_name("others"))


def _forget_weights(system: Any, path: str, names: Collection[str], room: Path) -> None:
    """Removes weights that were written for a model at `path` before, and that no file there names, each one fetched.

    Where files there are large, or one cannot be fetched, old weights stay.
    """
    home, own = posixpath.split(path)
    system.invalidate_cache(home)
    there = {posixpath.basename(one["name"]): one for one in system.ls(home, detail=True) if one["type"] == "file"}
    left = set(written_for(own, there)) - set(names)
    others = {name: one["size"] for name, one in there.items() if name != own and may_name(name)}
    if not left or None in others.values() or sum(others.values()) > MAX_FETCHED:
        return
    room.mkdir()
    try:
        for name in others:
            _fetch(system, home, name, room)
    except Exception:  # noqa: BLE001 - services raise their own kinds; the output is there, and others may need the old weights
        return
    for name in unnamed(sorted(left), [room / name for name in others]):
        system.rm_file(f"{home}/{name}")


@contextmanager
def _asking(address: str, kind: type[GraphQuantError], what: str) -> Iterator[tuple[Any, str]]:
    """The file system and the path in it that an address means; what its service refuses is an error of this kind."""
    try:
        import fsspec

        yield fsspec.core.url_to_fs(address)
    except GraphQuantError:
        raise
    except ImportError as error:
        raise MissingDependencyError(
            f"{address} needs fsspec, or what it needs for that service ({error}). Install it: {INSTALL}"
        ) from error
    except Exception as error:  # each service raises its own kinds, which have no common base
        said = str(error).strip().rstrip(".") or type(error).__name__
        raise kind(f"{address} cannot be {what}: {said}. See that it exists and that you may use it.") from error
