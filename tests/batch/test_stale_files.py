"""Removal of partial files of killed processes."""

import os
import subprocess
import sys

from graphquant.batch.workers import remove_stale_files
from graphquant.utils.atomic_files import atomic_file, make_staging_folder


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
