"""Tables that never fold a name."""

from __future__ import annotations

from graphquant.visualize.tables import NameTable, render_text

NAMES = ("short:0", "a/name/that/is/longer/than/its/column:0")


def listed(monkeypatch, width: int) -> list[str]:
    """A listing at that many columns."""
    monkeypatch.setenv("COLUMNS", str(width))
    listing = NameTable("tensor", "dtype", "scale")
    for name in NAMES:
        listing.add_row(name, "int8", "0.0123..0.456")
    return render_text(listing, folded=True).splitlines()


def test_what_fits_is_a_table(monkeypatch) -> None:
    """Names and cells are in columns, and no line ends with spaces."""
    assert listed(monkeypatch, 80) == [
        "tensor                                   dtype  scale",
        "short:0                                  int8   0.0123..0.456",
        "a/name/that/is/longer/than/its/column:0  int8   0.0123..0.456",
    ]


def test_a_long_name_has_its_own_line(monkeypatch) -> None:
    """What is told of it follows in the columns of the others."""
    assert listed(monkeypatch, 40) == [
        "tensor              dtype  scale",
        "short:0             int8   0.0123..0.456",
        "a/name/that/is/longer/than/its/column:0",
        "                    int8   0.0123..0.456",
    ]


def test_without_room_for_cells(monkeypatch) -> None:
    """What is told of them follows on lines of its own, folded between cells; a name is as long as it is."""
    assert listed(monkeypatch, 26) == [
        "tensor",
        "    dtype  scale",
        "short:0",
        "    int8   0.0123..0.456",
        "a/name/that/is/longer/than/its/column:0",
        "    int8   0.0123..0.456",
    ]
    assert listed(monkeypatch, 20)[3:5] == ["    int8", "    0.0123..0.456"]


def test_double_width_letters(monkeypatch) -> None:
    """Columns are counted as a terminal shows them."""
    monkeypatch.setenv("COLUMNS", "80")
    listing = NameTable("tensor", "dtype")
    listing.add_row("加算:0", "int8")
    listing.add_row("add:0", "int8")
    assert render_text(listing, folded=True).splitlines()[1:] == ["加算:0  int8", "add:0   int8"]


def test_numbers_are_right_aligned(monkeypatch) -> None:
    """Columns of numbers are aligned at their right; a note stands below its row, and a style is the whole row's."""
    monkeypatch.setenv("COLUMNS", "80")
    listing = NameTable("tensor", "dB", right=["dB"])
    listing.add_row("a:0", "7.25", note="of one sample")
    listing.add_row("b:0", "41.00", style="red")
    assert render_text(listing, folded=True).splitlines() == [
        "tensor     dB",
        "a:0      7.25",
        "  of one sample",
        "b:0     41.00",
    ]
