"""A report with an outcome of each status, and names that contain markup."""

from __future__ import annotations

import pytest

from graphquant.batch.types import (
    BatchFinding,
    BatchReport,
    Digests,
    GateMiss,
    Outcome,
    OutcomeChange,
    OutcomeMetrics,
    Problem,
)

HOSTILE = "</script><script>alert(1)</script>\"'&amp;|`*[x](y)\x1b[31m\u2028%<!--\udc80]]>,"


@pytest.fixture
def hostile_name() -> str:
    """Return a name with special characters of every report format."""
    return HOSTILE


@pytest.fixture
def report_of_each_status() -> BatchReport:
    """Return a report with an outcome of each status, findings, gates and changes."""
    successful = {
        "digests": Digests(model="a" * 64, rules="b" * 64, data="c" * 64, output="d" * 64, key="e" * 64),
        "products": {"net.quant.onnx": "d" * 64},
        "size_before": 52_143,
        "size_after": 17_301,
        "sites": 24,
        "int8_ops": (13, 15),
        "metrics": OutcomeMetrics(sqnr=38.25, agreement=0.99, samples=100),
        "versions": {"graphquant": "0.1.0", "onnxruntime": "1.31.0"},
        "seconds": 1.25,
    }
    finding = BatchFinding(
        code="GQ102", level="warning", graph="then", op="conv 1", message="it runs in float", fix="mend it"
    )
    outcomes = (
        Outcome(name="net", model="models/net.onnx", output="models/net.quant.onnx", status="done", **successful),
        Outcome(name="kept", model="models/kept.pb", output="models/kept.quant.pb", status="unchanged", **successful),
        Outcome(
            name="gated",
            model="models/gated.onnx",
            output="models/gated.quant.onnx",
            status="gate",
            misses=(GateMiss(gate="min_sqnr", message="SQNR is 12.0 dB, and 30 were asked for"),),
            findings=(finding,),
            **{**successful, "metrics": OutcomeMetrics(sqnr=12.0, samples=8)},
        ),
        Outcome(
            name=HOSTILE,
            model=f"models/{HOSTILE}.onnx",
            output=f"models/{HOSTILE}.quant.onnx",
            status="failed",
            problem=Problem(kind="ModelError", message=f"{HOSTILE} is\nno model. Mend it.", exit_code=3),
        ),
        *(
            Outcome(
                name=status,
                model=f"{status}.onnx",
                output=f"{status}.quant.onnx",
                status=status,
                problem=Problem(kind=kind, message=f"It {status}. Give it more."),
                seconds=61.0,
                attempts=2,
            )
            for status, kind in (("timeout", "Timeout"), ("crashed", "Crash"), ("memory", "Memory"))
        ),
        Outcome(name="later", model="later.onnx", output="later.quant.onnx", status="skipped", attempts=0),
    )
    changes = (
        OutcomeChange(name="net", kind="sqnr", level="error", message="SQNR is 38.2 dB, and was 42.0 dB"),
        OutcomeChange(name="kept", kind="seconds", level="note", message="it took 3.0 s, and took 1.0 s"),
        OutcomeChange(
            name="old", kind="missing", level="error", message="the last report has it, and this batch does not"
        ),
    )
    return BatchReport(version="0.1.0", outcomes=outcomes, started=1_790_000_000.25, seconds=124.5, changes=changes)
