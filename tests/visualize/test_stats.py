"""Range reports as a table in the terminal, as a page and as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO, TextIOWrapper

import numpy as np
import pytest
from rich.console import Console
from support.qparams import asymmetric_qparams, choose_qparams

from graphquant.analysis.range_report import MethodRange, RangeReport, TensorRange
from graphquant.calibration.stats import DataRun, Stats
from graphquant.calibration.targets import ObservationTarget
from graphquant.ir import TensorRef
from graphquant.numerics import IntType, QParams, Range
from graphquant.observers import Sketch, estimate_cost, sketch_values
from graphquant.visualize.json_results import InspectStatsResult
from graphquant.visualize.statistics_report import range_report_view, share_text, stats_page

HOSTILE = '</script><script>alert("1")</script><img src=x onerror=alert(1)>\x1b[31m&amp;'
UINT8 = IntType(8, signed=False)


def _tensor_range(name: str, values: np.ndarray, params: QParams, **fields: object) -> TensorRange:
    sketch = sketch_values(values.astype(np.float32), bits=7)
    cost = estimate_cost(sketch, params)
    alternatives = (
        MethodRange(method="mse", params=params, cost=cost),
        MethodRange(method="minmax", params=asymmetric_qparams(-9, 9), cost=cost),
    )
    tensor_range = TensorRange(
        tensor=TensorRef("", name), sketch=sketch, params=params, cost=cost, alternatives=alternatives, rule="some-rule"
    )
    return replace(tensor_range, **fields)


@pytest.fixture
def range_report() -> RangeReport:
    """Return a report of four tensors: clipped, with a hostile name, per channel, and without samples."""
    random = np.random.default_rng(3)
    values = np.concatenate([random.normal(size=5000), [1000.0, np.nan, np.nan]])
    channels = sketch_values(random.normal(size=(50, 6)).astype(np.float32), axis=1)
    channel_params = choose_qparams(Range(-np.ones(6), np.ones(6)), UINT8, symmetric=False, axis=1)
    tensor_ranges = (
        _tensor_range(
            "block_1/a_long_name/of/an/activation/relu",
            values,
            asymmetric_qparams(-3, 3),
            method="auto",
            auto_method="mse",
        ),
        _tensor_range(
            HOSTILE, np.abs(values[:50]), asymmetric_qparams(0, 5), method="percentile 99.9", rule=HOSTILE, note=HOSTILE
        ),
        TensorRange(
            tensor=TensorRef("body", "each"), sketch=channels, params=channel_params, method="minmax", rule="r"
        ),
        TensorRange(tensor=TensorRef("", "left"), sketch=None, note="no sample of the data reached it"),
    )
    run = DataRun(data_digest="ab", samples=9, block_size=4, block_ranges=((0, 2),), random=True)
    sketches = {entry.tensor: entry.sketch for entry in tensor_ranges if entry.sketch}
    targets = {entry.tensor: ObservationTarget("cd", None, 7) for entry in tensor_ranges}
    return RangeReport(
        stats=Stats(model_digest="ef", targets=targets, sketches=sketches, runs=(run,)),
        model="m.onnx",
        tensor_ranges=tensor_ranges,
    )


def _print_report(range_report: RangeReport, width: int, encoding: str = "utf-8") -> list[str]:
    raw = BytesIO()
    stream = TextIOWrapper(raw, encoding)
    Console(file=stream, width=width, color_system=None, markup=False, highlight=False).print(
        range_report_view(range_report)
    )
    stream.flush()
    return raw.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_table_fits_the_width(range_report: RangeReport, width: int) -> None:
    """No line exceeds the width, hidden columns are named, and a wider table shows more columns."""
    lines = _print_report(range_report, width)
    assert max(map(len, lines)) <= width
    header = next(line for line in lines if line.startswith("tensor"))
    assert ("SQNR" in header, "range" in header, "method" in header) == (True, width > 60, width > 80)
    hint_lines = [line for line in lines if line.startswith("For more columns")]
    assert len(hint_lines) == 1
    assert ("range" in hint_lines[0]) == (width <= 60)


def test_wide_table_has_every_column(range_report: RangeReport) -> None:
    """A wide row has cost, range, method, type and rule. The histogram marks the range."""
    lines = _print_report(range_report, 300)
    first = next(line for line in lines if line.startswith("block_1"))
    for cell in ("auto: mse", "[-2.988, 3.012]", "uint8", "some-rule", "1000]"):
        assert cell in first
    cost = range_report.tensor_ranges[0].cost
    assert cost is not None
    assert f"{cost.sqnr:.1f}" in first
    bars = first.partition("[")[2].partition("]")
    assert bars[0].count("█") > 3
    assert bars[2].lstrip().startswith("▂")
    assert any("samples" in line and "RANDOM" not in line for line in lines)
    assert [line for line in lines if " RANDOM: " in line] != []
    assert [line for line in lines if " 8 of 9 samples " in line and "calibrate --merge" in line] != []
    assert f"left:0: {range_report.tensor_ranges[3].note}" in lines


def test_many_notes_are_counted(range_report: RangeReport) -> None:
    """The table prints twelve notes and the number of the others."""
    tensor_ranges = tuple(replace(range_report.tensor_ranges[3], note=f"note {number}") for number in range(20))
    lines = _print_report(replace(range_report, tensor_ranges=tensor_ranges), 100)
    assert sum(line.startswith("left:0: note") for line in lines) == 12
    assert [line for line in lines if line.startswith("8 more notes ") and "--format json" in line] != []


def test_ascii_terminals(range_report: RangeReport) -> None:
    """Bars are ASCII signs on an ASCII terminal, and names cannot write escape sequences."""
    lines = _print_report(replace(range_report, tensor_ranges=range_report.tensor_ranges[:1]), 100, "ascii")
    assert any("[" in line and "@" in line for line in lines)
    assert not any("\x1b" in line for line in _print_report(range_report, 100))


def test_statistics_without_a_model(range_report: RangeReport) -> None:
    """Without a model the table has the extremes, the number of values, and the number of NaN."""
    tensor_ranges = tuple(
        TensorRange(tensor=entry.tensor, sketch=entry.sketch, note=entry.note) for entry in range_report.tensor_ranges
    )
    lines = _print_report(replace(range_report, model="", tensor_ranges=tensor_ranges), 100)
    assert re.findall(r"\b\d+ \w+", lines[0])[-3:] == ["4 tensors", "8 samples", "2 blocks"]
    assert next(line for line in lines if "5,003" in line).split()[-2:] == ["5,003", "2"]
    assert "body/each:0" in "".join(lines)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_is_self_contained(range_report: RangeReport) -> None:
    """The page is well-formed and reproducible, has no external resource or script, and escapes names."""
    html = stats_page(range_report)
    assert html == stats_page(range_report)
    reader = _Reader()
    reader.feed(html)
    assert reader.open == []
    assert not {"script", "img", "link", "iframe", "object"} & set(reader.tags)
    for name, value in reader.attributes:
        assert not name.startswith("on")
        assert name not in {"src", "srcset", "style"}
        assert name != "href" or (value or "").startswith("#t")
    assert "url(" not in html
    assert "@import" not in html
    assert '</script><script>alert("1")</script>' in reader.text
    assert "\x1b" not in html
    assert "default-src 'none'" in html


def test_page_shows_each_tensor(range_report: RangeReport) -> None:
    """Each tensor has a histogram or a plot of its channels, counts, and a link in the table."""
    html = stats_page(range_report)
    for part in ("channels 0 to 5", "log beyond ±", "RANDOM", "2 NaN", "5,003"):
        assert part in html
    assert [f'id="t{number}"' in html and f'href="#t{number}"' in html for number in range(4)] == [True] * 4
    assert range_report.tensor_ranges[3].note in html


def test_json_export(range_report: RangeReport) -> None:
    """The JSON is strict, and has statistics, range, cost and alternatives."""
    data = json.loads(json.dumps(InspectStatsResult.model_validate(range_report).as_json(), allow_nan=False))
    first = data["tensors"][0]
    assert (first["statistics"]["count"], first["statistics"]["nan"], first["statistics"]["inf"]) == (5003, 2, 0)
    assert sum(first["statistics"]["histogram"]["counts"]) == pytest.approx(5001)
    assert len(first["statistics"]["histogram"]["edges"]) == len(first["statistics"]["histogram"]["counts"]) + 1
    assert first["cost"]["above"] == pytest.approx(np.mean(np.sort(_values()) > 3), abs=1e-3)
    assert [alternative["method"] for alternative in first["alternatives"]] == ["mse", "minmax"]
    assert (data["samples"], data["random"], data["complete"], data["schema"]) == (8, True, False, 2)
    assert data["tensors"][2]["statistics"]["histogram"] is None
    assert len(data["tensors"][2]["statistics"]["low"]) == 6
    assert data["tensors"][3]["statistics"] is None
    assert data["tensors"][3]["note"] == range_report.tensor_ranges[3].note != ""


def _values() -> np.ndarray:
    return np.random.default_rng(3).normal(size=5000)


def test_non_finite_values() -> None:
    """Tensors of NaN or infinity have no histogram, and every output works."""
    sketch = sketch_values(np.full(3, np.nan, np.float32), bits=7)
    tensor_ranges = (
        TensorRange(tensor=TensorRef("", "a"), sketch=sketch),
        TensorRange(tensor=TensorRef("", "b"), sketch=_infinite()),
    )
    report = RangeReport(stats=Stats(model_digest="ef", targets={}, sketches={}), tensor_ranges=tensor_ranges)
    data = InspectStatsResult.model_validate(report).as_json()
    assert json.loads(json.dumps(data, allow_nan=False))["tensors"][0]["statistics"]["low"] is None
    assert "3 NaN" in stats_page(report)
    assert "2 infinite" in stats_page(report)
    assert any("b:0" in line for line in _print_report(report, 80))


def _infinite() -> Sketch:
    return sketch_values(np.array([np.inf, -np.inf, 1.0], np.float32), bits=7)


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0"), (1e-9, "<0.001%"), (1e-5, "0.001%"), (0.0123, "1.2%"), (0.257, "25.7%"), (1, "100%")]
)
def test_shares(share: float, text: str) -> None:
    """Shares are percentages with two digits, and no positive share is printed as zero."""
    assert share_text(share) == text
