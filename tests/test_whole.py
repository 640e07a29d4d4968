"""Folders that take the place of others."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from graphquant import whole
from graphquant.whole import room_beside, take_place


def folder(path, said):
    """A folder with a file in it."""
    path.mkdir()
    path.joinpath("saved_model.pb").write_text(said, "utf-8")
    return path


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_takes_the_place_of_another(tmp_path, monkeypatch, exchanges):
    """The new one is there, and the old one in the room; where nothing was, nothing is in the room."""
    if not exchanges:
        monkeypatch.setattr(whole, "_exchanged", lambda _one, _other: False)
    path = tmp_path / "net"
    for said in ("first", "second"):
        room = room_beside(path)
        take_place(folder(room / "new", said), path, room)
        assert path.joinpath("saved_model.pb").read_text("utf-8") == said
        kept = [file.read_text("utf-8") for file in room.rglob("*.pb")]
        assert kept == (["first"] if said == "second" else [])


def test_what_cannot_be_moved_stays(tmp_path, monkeypatch):
    """Without an exchange the old folder comes back if the new one cannot be put there."""
    monkeypatch.setattr(whole, "_exchanged", lambda _one, _other: False)
    path = folder(tmp_path / "net", "old")
    room = room_beside(path)
    with pytest.raises(FileNotFoundError):
        take_place(room / "missing", path, room)
    assert path.joinpath("saved_model.pb").read_text("utf-8") == "old"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems exchange nothing at once")
def test_at_no_time_there_is_nothing(tmp_path):
    """Who looks all the while sees the one or the other, whenever it is."""
    path = folder(tmp_path / "net", "0")
    done, missed = threading.Event(), []

    def look():
        while not done.is_set():
            if not os.path.lexists(path):
                missed.append(1)

    looking = threading.Thread(target=look)
    looking.start()
    for number in range(300):
        room = room_beside(path)
        take_place(folder(room / "new", str(number)), path, room)
    done.set()
    looking.join()
    assert missed == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems exchange nothing at once")
def test_killed_at_any_moment(tmp_path):
    """A process that replaces a folder again and again, and is killed, leaves a whole one."""
    text = (
        "import sys; from pathlib import Path; from graphquant.whole import room_beside, take_place\n"
        "path = Path(sys.argv[1])\n"
        "while True:\n"
        "    room = room_beside(path); new = room / 'new'; new.mkdir(); (new / 'saved_model.pb').write_text('whole')\n"
        "    take_place(new, path, room); print(flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    path = folder(tmp_path / "net", "whole")
    for rounds in range(1, 9):
        command = [sys.executable, "-c", text, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            for _ in range(rounds * 7):
                process.stdout.readline()
            process.kill()
        assert Path(path, "saved_model.pb").read_text("utf-8") == "whole"
