"""Tables that never wrap a name, in text, Markdown, HTML and CSV."""

from __future__ import annotations

import numpy as np
import pytest

import graphquant as gq
from graphquant.analysis.conversion_report import ConversionReport, ConvertedTensor
from graphquant.api.inspect import inspect_stats
from graphquant.ir import TensorRef
from graphquant.visualize import check_report, compare_report, statistics_report, tables, text
from graphquant.visualize.tables import Column, Table, render_text

TENSOR = Column("tensor", lambda row: row[0])
NAMES = ("short:0", "a/name/that/is/longer/than/its/column:0")


def render_lines(monkeypatch, width: int) -> list[str]:
    """Return the lines of a table at a width."""
    monkeypatch.setenv("COLUMNS", str(width))
    columns = [TENSOR, Column("dtype", lambda _: "int8"), Column("scale", lambda _: "0.0123..0.456")]
    table = Table(columns, [(name,) for name in NAMES])
    return render_text(table, folded=True).splitlines()


def test_table_that_fits(monkeypatch) -> None:
    """Names and cells are in columns, and no line ends with spaces."""
    assert render_lines(monkeypatch, 80) == [
        "tensor                                   dtype  scale",
        "short:0                                  int8   0.0123..0.456",
        "a/name/that/is/longer/than/its/column:0  int8   0.0123..0.456",
    ]


def test_long_name_has_its_own_line(monkeypatch) -> None:
    """The cells of a long name follow on the next line, in their columns."""
    assert render_lines(monkeypatch, 40) == [
        "tensor              dtype  scale",
        "short:0             int8   0.0123..0.456",
        "a/name/that/is/longer/than/its/column:0",
        "                    int8   0.0123..0.456",
    ]


def test_without_room_for_cells(monkeypatch) -> None:
    """Without room for the columns, cells follow on indented lines that wrap between cells. Names never wrap."""
    assert render_lines(monkeypatch, 26) == [
        "tensor",
        "    dtype  scale",
        "short:0",
        "    int8   0.0123..0.456",
        "a/name/that/is/longer/than/its/column:0",
        "    int8   0.0123..0.456",
    ]
    assert render_lines(monkeypatch, 20)[3:5] == ["    int8", "    0.0123..0.456"]


def test_rows_beyond_the_limit_are_counted(monkeypatch) -> None:
    """Text ends after the first rows with the number of the others; CSV has all rows."""
    monkeypatch.setattr(tables, "ROWS_SHOWN", 2)
    table = Table([TENSOR], [(name,) for name in "abcde"])
    lines = render_text(table).splitlines()
    assert lines[:3] == ["tensor", "a", "b"]
    assert lines[3].split()[0] == "3"
    assert len(lines) == 4
    assert table.csv_text().split() == ["tensor", *"abcde"]
    assert render_text(Table([TENSOR], [("a",), ("b",)])).splitlines() == ["tensor", "a", "b"]


def test_double_width_letters(monkeypatch) -> None:
    """Columns are aligned by the width that a terminal shows."""
    monkeypatch.setenv("COLUMNS", "80")
    table = Table([TENSOR, Column("dtype", lambda _: "int8")], [("加算:0",), ("add:0",)])
    assert render_text(table, folded=True).splitlines()[1:] == ["加算:0  int8", "add:0   int8"]


def test_numbers_are_right_aligned(monkeypatch) -> None:
    """Numbers are right-aligned, a note is below its row, and a style applies to the whole row."""
    monkeypatch.setenv("COLUMNS", "80")
    decibels = Column("", lambda row: row[1], "{:.2f}".format, unit="dB", number=True)
    table = Table(
        [TENSOR, decibels],
        [("a:0", 7.25, "of one sample"), ("b:0", 41, "")],
        style=lambda row: "red" if row[1] > 40 else "",
        note=lambda row: row[2],
    )
    assert render_text(table, folded=True).splitlines() == [
        "tensor     dB",
        "a:0      7.25",
        "  of one sample",
        "b:0     41.00",
    ]


def test_formats_of_a_table():
    """Text, Markdown, HTML and CSV have the same columns; CSV has unrounded numbers, and markup is escaped."""
    share = Column("share", lambda row: row[1], "{:.0%}".format, unit="of 1", number=True)
    table = Table([TENSOR, share], [("<b>|", 0.256), ("plain", None)])
    assert render_text(table).splitlines() == ["tensor  share of 1", "<b>|           26%", "plain"]
    assert table.csv_text() == "tensor,share of 1\n<b>|,0.256\nplain,\n"
    assert table.markdown_lines() == [
        "| tensor | share of 1 |",
        "| --- | ---: |",
        "| &#60;b&#62;&#124; | 26% |",
        "| plain |  |",
    ]
    assert list(table.html_lines()) == [
        '<thead><tr><th>tensor</th><th class="n">share of 1</th></tr></thead><tbody>',
        '<tr><td>&lt;b&gt;|</td><td class="n" data-v="0.256">26%</td></tr>',
        '<tr><td>plain</td><td class="n" data-v=""></td></tr>',
        "</tbody>",
    ]


def test_optional_columns():
    """An optional column is there if a row has a value for it."""
    columns = [TENSOR, Column("note", lambda row: row[1], optional=True)]
    assert render_text(Table(columns, [("a", None)])).split() == ["tensor", "a"]
    assert render_text(Table(columns, [("a", None), ("b", "x")])).split() == ["tensor", "note", "a", "b", "x"]


def comparison_of(samples):
    """Return the comparison of a model with itself, its view and its rows."""
    model = samples / "digits_cnn.onnx"
    comparison = gq.compare(model, model, data="random:2", sites=False)
    return compare_report.comparison_view(comparison, top=1), comparison.outputs


def checked_data_of(samples):
    """Return the view of a data check, and its rows."""
    report = gq.check_data(gq.load(samples / "digits_cnn.onnx"), "random:2")
    return check_report.data_check_view(report), report.inputs


def statistics_of(samples):
    """Return the view of statistics, and its rows."""
    report = inspect_stats(gq.calibrate(samples / "digits_cnn.onnx", data="random:2"), None)
    return statistics_report.range_report_view(report), report.tensor_ranges


def conversion_of(_samples):
    """Return the view of a conversion, and its rows."""
    scale_and_zero = np.ones(1), np.zeros(1, int)
    line = ConvertedTensor(
        tensor=TensorRef("", "a"), name="a", index=3, planned=scale_and_zero, runtime=scale_and_zero, problem=""
    )
    return text.conversion_view(ConversionReport(tensors=(line,), float_ops=(), op_count=1)), (line,)


@pytest.mark.parametrize(
    ("module", "name", "build"),
    [
        (compare_report, "OUTPUT_COLUMNS", comparison_of),
        (check_report, "INPUT_COLUMNS", checked_data_of),
        (statistics_report, "STATS_COLUMNS", statistics_of),
        (text, "CONVERSION_COLUMNS", conversion_of),
    ],
)
def test_an_added_column_is_in_every_output(module, name, build, samples, monkeypatch):
    """One more entry in a list of columns is a column of the text, Markdown, HTML and CSV."""
    columns = (*getattr(module, name), Column("votes", lambda _: 7.125, "{:.1f}".format, unit="of 9", number=True))
    monkeypatch.setattr(module, name, columns)
    view, rows = build(samples)
    table = Table(columns, rows)
    shown = render_text(view).splitlines()
    assert sum(line.endswith("        7.1") for line in shown) == len(rows)
    assert any(line.endswith("  votes of 9") for line in shown)
    assert [line.rpartition(",")[2] for line in table.csv_text().splitlines()] == ["votes of 9", *["7.125"] * len(rows)]
    assert [line.endswith("| 7.1 |") for line in table.markdown_lines()] == [False, False, *[True] * len(rows)]
    assert str(list(table.html_lines())).count('data-v="7.125">7.1</td>') == len(rows)


def test_joined_names_of_tflite_files() -> None:
    """The names that a converter joins for fused ops are one name and a number; a single name stays whole."""
    column = next(column for column in text.STORED_COLUMNS if column.name == "tensor")
    assert (column.form("relu;conv;bias"), column.form(NAMES[1])) == ("relu and 2 more", NAMES[1])
