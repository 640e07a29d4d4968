"""Tables that never fold a name."""

from __future__ import annotations

from graphquant.view.listing import Listing
from graphquant.view.text import text_of

NAMES = ("short:0", "a/name/that/is/longer/than/its/column:0")


def listed(monkeypatch, width: int) -> list[str]:
    """A listing at that many columns."""
    monkeypatch.setenv("COLUMNS", str(width))
    listing = Listing("tensor", "dtype", "scale")
    for name in NAMES:
        listing.add_row(name, "int8", "0.0123..0.456")
    return text_of(listing, folded=True).splitlines()


def test_what_fits_is_a_table(monkeypatch) -> None:
    """Names and cells are in columns, and no line ends with spaces."""
    assert listed(monkeypatch, 80) == [
        "tensor                                   dtype  scale",
        "short:0                                  int8   0.0123..0.456",
        "a/name/that/is/longer/than/its/column:0  int8   0.0123..0.456",
    ]


def test_a_long_name_stands_alone(monkeypatch) -> None:
    """What is told of it follows in the columns of the others."""
    assert listed(monkeypatch, 40) == [
        "tensor              dtype  scale",
        "short:0             int8   0.0123..0.456",
        "a/name/that/is/longer/than/its/column:0",
        "                    int8   0.0123..0.456",
    ]


def test_where_there_is_no_room_beside_names(monkeypatch) -> None:
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


def test_letters_of_two_columns(monkeypatch) -> None:
    """Columns are counted as a terminal shows them."""
    monkeypatch.setenv("COLUMNS", "80")
    listing = Listing("tensor", "dtype")
    listing.add_row("加算:0", "int8")
    listing.add_row("add:0", "int8")
    assert text_of(listing, folded=True).splitlines()[1:] == ["加算:0  int8", "add:0   int8"]


def test_numbers_end_alike(monkeypatch) -> None:
    """Columns of numbers are aligned at their right; a note stands below its row, and a style is the whole row's."""
    monkeypatch.setenv("COLUMNS", "80")
    listing = Listing("tensor", "dB", right=["dB"])
    listing.add_row("a:0", "7.25", note="of one sample")
    listing.add_row("b:0", "41.00", style="red")
    assert text_of(listing, folded=True).splitlines() == [
        "tensor     dB",
        "a:0      7.25",
        "  of one sample",
        "b:0     41.00",
    ]
