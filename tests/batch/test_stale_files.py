"""What killed processes leave beside outputs."""

import os
import subprocess
import sys

from graphquant.batch.workers import remove_stale_files
from graphquant.utils.atomic_files import atomic_file, make_staging_folder


def exited_process():
    """The number of a process that was there."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def test_partial_files_of_dead_processes_are_removed(tmp_path):
    """Those of a process that lives, of other outputs, and files that only look alike, stay."""
    dead = exited_process()
    stale = [f".a.onnx.{dead}.0123abcd.part", f".a.onnx.data.{dead}.0123abcd.part"]
    kept = [f".a.onnx.{os.getpid()}.0123abcd.part", f".other.onnx.{dead}.0123abcd.part", ".a.onnx.part", "a.onnx"]
    kept += [f"a.onnx.{dead}.0123abcd.part", f".a.onnx.{10**30}.0123abcd.part"]
    for name in [*stale, *kept]:
        (tmp_path / name).touch()
    remove_stale_files([str(tmp_path / "a.onnx"), str(tmp_path / "nowhere" / "b.onnx")])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_an_interrupted_folder_replacement(tmp_path):
    """One that was moved away and not yet replaced comes back; what was made ready goes."""
    dead = exited_process()
    for name in ("a.quant", "b.quant"):
        room = tmp_path / f".{name}.{dead}.abcd_123"
        for part in ("old", "new"):
            (room / part).mkdir(parents=True)
            (room / part / "saved_model.pb").write_text(part)
    (tmp_path / "b.quant").mkdir()
    (tmp_path / f".c.quant.{dead}.abcd_123").mkdir()
    remove_stale_files([str(tmp_path / "a.quant"), str(tmp_path / "b.quant")])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".c.quant.{dead}.abcd_123", "a.quant", "b.quant"]
    assert (tmp_path / "a.quant" / "saved_model.pb").read_text() == "old"
    assert list((tmp_path / "b.quant").iterdir()) == []


def test_a_folder_of_a_live_process(tmp_path):
    """A staging folder of a live process stays, as do its current file names."""
    room = make_staging_folder(tmp_path / "a.quant")
    with atomic_file(room / "saved_model.pb") as file, atomic_file(tmp_path / "a.quant") as other:
        before = sorted(tmp_path.rglob("*"))
        remove_stale_files([str(tmp_path / "a.quant"), str(room / "saved_model.pb")])
        assert sorted(tmp_path.rglob("*")) == before
        assert len(before) == 3
        file.write(b"")
        other.write(b"")


def test_names_of_partial_files_match(tmp_path):
    """Stale files of another process are found by their names."""
    text = (
        "import os, sys; from pathlib import Path\n"
        "from graphquant.utils.atomic_files import atomic_file, make_staging_folder\n"
        "path = Path(sys.argv[1]); make_staging_folder(path); held = atomic_file(path); held.__enter__(); os._exit(0)"
    )
    subprocess.run(
        [sys.executable, "-c", text, str(tmp_path / "a.quant")],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert len(list(tmp_path.iterdir())) == 2
    remove_stale_files([str(tmp_path / "a.quant")])
    assert list(tmp_path.iterdir()) == []
