"""Tables that never wrap a name."""

from __future__ import annotations

from graphquant.visualize.tables import NameTable, render_text

NAMES = ("short:0", "a/name/that/is/longer/than/its/column:0")


def render_lines(monkeypatch, width: int) -> list[str]:
    """Return the lines of a table at a width."""
    monkeypatch.setenv("COLUMNS", str(width))
    table = NameTable("tensor", "dtype", "scale")
    for name in NAMES:
        table.add_row(name, "int8", "0.0123..0.456")
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


def test_double_width_letters(monkeypatch) -> None:
    """Columns are aligned by the width that a terminal shows."""
    monkeypatch.setenv("COLUMNS", "80")
    table = NameTable("tensor", "dtype")
    table.add_row("加算:0", "int8")
    table.add_row("add:0", "int8")
    assert render_text(table, folded=True).splitlines()[1:] == ["加算:0  int8", "add:0   int8"]


def test_numbers_are_right_aligned(monkeypatch) -> None:
    """Numbers are right-aligned, a note is below its row, and a style applies to the whole row."""
    monkeypatch.setenv("COLUMNS", "80")
    table = NameTable("tensor", "dB", right=["dB"])
    table.add_row("a:0", "7.25", note="of one sample")
    table.add_row("b:0", "41.00", style="red")
    assert render_text(table, folded=True).splitlines() == [
        "tensor     dB",
        "a:0      7.25",
        "  of one sample",
        "b:0     41.00",
    ]
