"""What killed processes leave beside outputs."""

import os
import subprocess
import sys

from graphquant.batch.litter import sweep


def gone():
    """The number of a process that was there."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def test_unfinished_files_of_dead_processes_go(tmp_path):
    """Those of a process that lives, of other outputs, and files that only look alike, stay."""
    dead = gone()
    stale = [f".a.onnx.{dead}.part", f".a.onnx.data.{dead}.part"]
    kept = [f".a.onnx.{os.getpid()}.part", f".other.onnx.{dead}.part", f"a.onnx.{dead}.part", ".a.onnx.part", "a.onnx"]
    for name in [*stale, *kept]:
        (tmp_path / name).touch()
    sweep([str(tmp_path / "a.onnx"), str(tmp_path / "nowhere" / "b.onnx")])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_a_folder_that_was_being_replaced(tmp_path):
    """One that was moved away and not yet replaced comes back; what was made ready goes."""
    for name in ("a.quant", "b.quant"):
        room = tmp_path / f".{name}.abcd_123"
        for part in ("old", "new"):
            (room / part).mkdir(parents=True)
            (room / part / "saved_model.pb").write_text(part)
    (tmp_path / "b.quant").mkdir()
    (tmp_path / ".c.quant.abcd_123").mkdir()
    sweep([str(tmp_path / "a.quant"), str(tmp_path / "b.quant")])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".c.quant.abcd_123", "a.quant", "b.quant"]
    assert (tmp_path / "a.quant" / "saved_model.pb").read_text() == "old"
    assert list((tmp_path / "b.quant").iterdir()) == []
