"""Removal of partial files of killed processes, and the lock of an output."""

import fcntl
import os
import struct
import subprocess
import sys
from contextvars import Context
from types import SimpleNamespace

import pytest

from graphquant.errors import UsageError
from graphquant.utils.atomic_files import (
    atomic_file,
    lock_file,
    lock_output,
    make_staging_folder,
    remove_stale_files,
)


def exited_process_id():
    """Return the id of a process that has exited."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def test_partial_files_of_dead_processes_are_removed(tmp_path):
    """Files of live processes, of other outputs, and with similar names stay."""
    dead_id = exited_process_id()
    stale = [f".a.onnx.{dead_id}.0123abcd.part", f".a.onnx.data.{dead_id}.0123abcd.part"]
    preserved = [
        f".a.onnx.{os.getpid()}.0123abcd.part",
        f".other.onnx.{dead_id}.0123abcd.part",
        ".a.onnx.part",
        "a.onnx",
    ]
    preserved += [f"a.onnx.{dead_id}.0123abcd.part", f".a.onnx.{10**30}.0123abcd.part"]
    for name in [*stale, *preserved]:
        (tmp_path / name).touch()
    remove_stale_files([str(tmp_path / "a.onnx"), str(tmp_path / "nowhere" / "b.onnx")])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(preserved)


def test_interrupted_folder_replacement(tmp_path):
    """A folder that was moved away is restored. A staged folder is removed."""
    dead_id = exited_process_id()
    for name in ("a.quant", "b.quant"):
        staging = tmp_path / f".{name}.{dead_id}.abcd_123"
        for part in ("old", "new"):
            (staging / part).mkdir(parents=True)
            (staging / part / "saved_model.pb").write_text(part)
    (tmp_path / "b.quant").mkdir()
    (tmp_path / f".c.quant.{dead_id}.abcd_123").mkdir()
    remove_stale_files([str(tmp_path / "a.quant"), str(tmp_path / "b.quant")])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".c.quant.{dead_id}.abcd_123", "a.quant", "b.quant"]
    assert (tmp_path / "a.quant" / "saved_model.pb").read_text() == "old"
    assert list((tmp_path / "b.quant").iterdir()) == []


def test_staging_folder_of_a_live_process(tmp_path):
    """Staging folders and partial files of a live process stay."""
    staging = make_staging_folder(tmp_path / "a.quant")
    with atomic_file(staging / "saved_model.pb") as file, atomic_file(tmp_path / "a.quant") as other:
        before = sorted(tmp_path.rglob("*"))
        remove_stale_files([str(tmp_path / "a.quant"), str(staging / "saved_model.pb")])
        assert sorted(tmp_path.rglob("*")) == before
        assert len(before) == 3
        file.write(b"")
        other.write(b"")


def test_partial_files_of_another_process_are_removed(tmp_path):
    """Files that atomic_files writes in a process that exits are removed."""
    text = (
        "import os, sys; from pathlib import Path\n"
        "from graphquant.utils.atomic_files import atomic_file, make_staging_folder\n"
        "path = Path(sys.argv[1]); make_staging_folder(path); file = atomic_file(path); file.__enter__(); os._exit(0)"
    )
    subprocess.run(
        [sys.executable, "-c", text, str(tmp_path / "a.quant")],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert len(list(tmp_path.iterdir())) == 2
    remove_stale_files([str(tmp_path / "a.quant")])
    assert list(tmp_path.iterdir()) == []


def lock_as_another(path):
    """Lock the output for a moment as another thread would."""

    def lock():
        with lock_output(path):
            pass

    Context().run(lock)


def lock_byte_range(descriptor, mode, size):
    """Lock bytes at the position of an open file until it is closed, as msvcrt.locking does."""
    assert mode == 2
    request = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_CUR, 0, size, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except BlockingIOError as error:
        raise PermissionError(13, "Permission denied") from error


@pytest.fixture(params=["this system", "Windows"])
def system(request, monkeypatch):
    """This system, or Windows as far as locks of files go."""
    if request.param == "Windows":
        monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=lock_byte_range))
        monkeypatch.setattr(sys, "platform", "win32")


def test_lock_of_an_output(tmp_path, system):
    """One caller has the lock and can lock again, other outputs are free, and nothing is left."""
    with lock_output(tmp_path / "a.onnx"):
        with lock_output(tmp_path / "b.onnx"), lock_output(tmp_path / "a.onnx"):
            pass
        with pytest.raises(UsageError):
            lock_as_another(tmp_path / "a.onnx")
        remove_stale_files([tmp_path / "a.onnx"])
        assert [path.name for path in tmp_path.iterdir()] == [".a.onnx.lock"]
    with lock_output(tmp_path / "a.onnx"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_lock_of_a_file_that_grows(tmp_path, system):
    """A file is locked whatever is in it, and free once it is closed."""
    path = tmp_path / "journal"
    with path.open("a+b", buffering=0) as first:
        assert lock_file(first)
        first.write(b"one line")
        with path.open("a+b", buffering=0) as second:
            assert not lock_file(second)
    with path.open("a+b") as third:
        assert lock_file(third)


def test_lock_of_a_killed_process(tmp_path):
    """The lock ends with its process. The next run removes its file."""
    script = (
        "import sys; from pathlib import Path; from graphquant.utils.atomic_files import lock_output\n"
        "with lock_output(Path(sys.argv[1])): print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a.onnx")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(UsageError), lock_output(tmp_path / "a.onnx"):
            pass
        process.kill()
    assert [path.name for path in tmp_path.iterdir()] == [".a.onnx.lock"]
    remove_stale_files([tmp_path / "a.onnx"])
    assert list(tmp_path.iterdir()) == []


def test_lock_that_ends_while_another_process_opens_it(tmp_path, monkeypatch):
    """The lock of a file that was removed in the meantime counts for nothing, so a new file is locked."""
    path, links = tmp_path / "a.onnx", []

    def unlink_first(descriptor, fstat=os.fstat):
        if not links:
            (tmp_path / ".a.onnx.lock").unlink()
        links.append(fstat(descriptor).st_nlink)
        return fstat(descriptor)

    monkeypatch.setattr("graphquant.utils.atomic_files.os.fstat", unlink_first)
    with lock_output(path), pytest.raises(UsageError):
        lock_as_another(path)
    assert links == [0, 1]
