"""The committed report of `benchmarks/report.py`."""

import json
import re
import runpy
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
REPORT = json.loads(BENCHMARKS.joinpath("report.json").read_text("utf-8"))
PAGE = BENCHMARKS.joinpath("report.html").read_text("utf-8")


def test_page_shows_the_figures():
    """The page is the one of the committed figures."""
    assert runpy.run_path(str(BENCHMARKS / "report_page.py"))["render_page"](REPORT) == PAGE


def test_page_needs_no_other_file():
    """The page loads nothing, has no folders of the machine, and has colors for both schemes."""
    assert re.findall(r"(?:src|href|url)\s*[=(]", PAGE) == []
    assert re.findall(r"/(?:tmp|home|work)/", PAGE) == []
    assert "prefers-color-scheme: dark" in PAGE


def test_each_tool_has_a_mark_of_its_own():
    """No two tools have the same shape and color."""
    legend = re.findall(
        r'class="key"><svg[^>]*><path transform="[^"]*" d="([^"]*)" style="([^"]*)"[^>]*></path></svg> ([^<]*)', PAGE
    )
    marks = {tool: (shape, color) for shape, color, tool in legend}
    assert set(marks) == set(REPORT["summary"])
    assert len(set(marks.values())) == len(marks)


def test_summary_counts_models():
    """The summary of graphquant's ONNX results is that of the results by model."""
    results = [entry["results"]["graphquant"] for entry in REPORT["models"].values() if entry["format"] == "onnx"]
    summary = REPORT["summary"]["graphquant"]
    assert summary["models"] == len(results)
    assert summary["failed"] == sum(bool(figures["failure"]) for figures in results)
    assert summary["at_least_20_db"] == sum((figures["sqnr"] or 0) >= 20 for figures in results)
