"""Verification that a rebuild gives the outputs of a batch."""

import shutil
from pathlib import Path

import pytest

from graphquant.batch.attestation import verify_outputs
from graphquant.batch.run import BatchOptions, run_batch
from graphquant.batch.types import Entry, Gates
from graphquant.batch.work import quantize_entry


@pytest.mark.slow
def test_verifying_outputs_with_bounds(tmp_path, samples, monkeypatch):
    """Outputs that were searched for with a bound are reproduced. A missed gate is no difference."""
    for name in ("digits_cnn.onnx", "digits_cnn_calib.npz"):
        shutil.copy(samples / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    sample_entries = [
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

    def build(entries, folder):
        return run_batch(entries, BatchOptions(folder=folder, cache=False), lambda todo: map(quantize_entry, todo))

    expected = build(sample_entries, tmp_path / "cache")
    assert [[miss.gate for miss in outcome.misses] for outcome in expected.outcomes] == [["max_size"], ["max_size"]]
    report = verify_outputs(sample_entries, build, expected)
    assert report.changes == ()
    assert [(outcome.status, outcome.misses) for outcome in report.outcomes] == [("done", ())] * 2
    Path("met.onnx").write_bytes(Path("digits_cnn.onnx").read_bytes())
    assert [change.name for change in verify_outputs(sample_entries[:1], build).changes] == ["met"]
