"""Outputs that are built again are what a batch made of the same."""

import shutil
from pathlib import Path

from graphquant.batch.attestation import verify_outputs
from graphquant.batch.run import BatchOptions, run_batch
from graphquant.batch.types import Entry, Gates
from graphquant.batch.work import quantize_entry


def test_verifying_outputs_with_bounds(tmp_path, samples, monkeypatch):
    """What was searched for by a bound is built by it again; a gate that is missed is no difference."""
    for name in ("digits_cnn.onnx", "digits_cnn_calib.npz"):
        shutil.copy(samples / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    made = [
        Entry(
            name=name,
            model="digits_cnn.onnx",
            output=f"{name}.onnx",
            data="digits_cnn_calib.npz",
            samples=40,
            gates=Gates(min_sqnr=bound, max_size=1, check=""),
        )
        for name, bound in (("met", 20), ("searched", 56))
    ]

    def build(entries, room):
        return run_batch(entries, BatchOptions(folder=room, cache=False), lambda todo: map(quantize_entry, todo))

    last = build(made, tmp_path / "cache")
    assert [[miss.gate for miss in one.misses] for one in last.outcomes] == [["max_size"], ["max_size"]]
    report = verify_outputs(made, build, last)
    assert report.changes == ()
    assert [(one.status, one.misses) for one in report.outcomes] == [("done", ())] * 2
    Path("met.onnx").write_bytes(Path("digits_cnn.onnx").read_bytes())
    assert [change.name for change in verify_outputs(made[:1], build).changes] == ["met"]
