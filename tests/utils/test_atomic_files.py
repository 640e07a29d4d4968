"""Replacement of folders."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from graphquant.utils import atomic_files
from graphquant.utils.atomic_files import make_staging_folder, replace_folder


def folder_with_file(path, content):
    """Create a folder with a file in it."""
    path.mkdir()
    path.joinpath("saved_model.pb").write_text(content, "utf-8")
    return path


@pytest.mark.parametrize("exchanges", [True, False])
def test_folder_replaces_another_folder(tmp_path, monkeypatch, exchanges):
    """The new folder is at the path, and the old one in the staging folder, which stays empty if there was none."""
    if not exchanges:
        monkeypatch.setattr(atomic_files, "_exchange_paths", lambda _one, _other: False)
    path = tmp_path / "net"
    for content in ("first", "second"):
        room = make_staging_folder(path)
        replace_folder(folder_with_file(room / "new", content), path, room)
        assert path.joinpath("saved_model.pb").read_text("utf-8") == content
        contents = [file.read_text("utf-8") for file in room.rglob("*.pb")]
        assert contents == (["first"] if content == "second" else [])


def test_folder_stays_when_it_cannot_be_replaced(tmp_path, monkeypatch):
    """Without an exchange, the old folder is restored if the new one cannot be moved."""
    monkeypatch.setattr(atomic_files, "_exchange_paths", lambda _one, _other: False)
    path = folder_with_file(tmp_path / "net", "old")
    room = make_staging_folder(path)
    with pytest.raises(FileNotFoundError):
        replace_folder(room / "missing", path, room)
    assert path.joinpath("saved_model.pb").read_text("utf-8") == "old"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems exchange nothing at once")
def test_path_always_exists_while_replaced(tmp_path):
    """A reader sees the old or the new folder at any time."""
    path = folder_with_file(tmp_path / "net", "0")
    stop, missed = threading.Event(), []

    def look():
        while not stop.is_set():
            if not os.path.lexists(path):
                missed.append(1)

    looking = threading.Thread(target=look)
    looking.start()
    for number in range(300):
        room = make_staging_folder(path)
        replace_folder(folder_with_file(room / "new", str(number)), path, room)
    stop.set()
    looking.join()
    assert missed == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems exchange nothing at once")
def test_killed_at_any_moment(tmp_path):
    """A process that is killed while it replaces folders leaves a complete folder."""
    text = (
        "import sys; from pathlib import Path\n"
        "from graphquant.utils.atomic_files import make_staging_folder, replace_folder\n"
        "path = Path(sys.argv[1])\n"
        "while True:\n"
        "    room = make_staging_folder(path); new = room / 'new'; new.mkdir()\n"
        "    (new / 'saved_model.pb').write_text('whole'); replace_folder(new, path, room); print(flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    path = folder_with_file(tmp_path / "net", "whole")
    for rounds in range(1, 9):
        command = [sys.executable, "-c", text, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            for _ in range(rounds * 7):
                assert process.stdout.readline()
            process.kill()
        assert Path(path, "saved_model.pb").read_text("utf-8") == "whole"


def test_failed_writes_name_the_file(tmp_path):
    """An error while writing, which has no name of its own, gets that of the file, and nothing is left."""
    with pytest.raises(OSError, match="too large") as error, atomic_files.atomic_file(tmp_path / "a.onnx"):
        raise OSError(27, "File too large")
    assert error.value.filename == str(tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []
