"""Statistics in the terminal: a line for each tensor with its histogram, the range that was picked, and the cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from graphquant.errors import printable
from graphquant.view.histogram import line
from graphquant.view.listing import Listing
from graphquant.view.text import counted, incomplete, listed, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from graphquant.numerics import QParams
    from graphquant.picked import Pick, Picks
    from graphquant.sketch import Cost

NAME, BARS = 20, 16
"""The least columns for a tensor's name, if it has as many, and for its histogram."""

WIDEST = 44
"""The most columns for a histogram."""

GAP = 2

NOTES = 12
"""Notes that are printed; all of them are in the JSON data."""

BY_NAME = "The model has its ranges in it; which tensor is which is told by names alone."

EXACT = 140.0
"""Decibels beyond which nothing is lost that a float32 has."""


def picks_view(picks: Picks) -> RenderableType:
    """The table of tensors, the worst first where a model tells what is lost, and what is to be said of some."""
    stats = picks.stats
    parts: list[RenderableType] = [plain(head(picks), style="bold")]
    if stats.random:
        parts.append(plain("The data is RANDOM: what it shows is for tests only.", style="bold red"))
    parts += incomplete(stats)
    if picks.by_name:
        parts.append(plain(BY_NAME, style="dim"))
    if not picks.picks:
        parts.append(plain("None of them has a range that insert would give it." if picks.model else "It is empty."))
        return Group(*parts)
    parts.append(_Histograms(picks.picks, known=bool(picks.model)))
    notes: dict[str, list[str]] = {}
    for one in picks.picks:
        if one.note:
            notes.setdefault(one.note, []).append(str(one.tensor))
    said = [f"{listed(names)}: {note}" for note, names in notes.items()]
    parts += [plain(note, style="yellow") for note in said[:NOTES]]
    if len(said) > NOTES:
        parts.append(plain(f"{len(said) - NOTES} more such notes are in --format json.", style="dim"))
    parts.append(plain(_legend(picks), style="dim"))
    return Group(*parts)


def sqnr_text(cost: Cost | None) -> str:
    """The estimated SQNR in dB, to a tenth; "exact" where nothing is lost."""
    if cost is None:
        return ""
    return "exact" if cost.sqnr > EXACT else f"{cost.sqnr:.1f}"


def share(part: float) -> str:
    """A share, 0 to 1, in percent."""
    if not part:
        return "0"
    if part < 1e-5:  # noqa: PLR2004  # a thousandth of a percent
        return "<0.001%"
    return f"{100 * part:.{2 if part < 0.1 else 3}g}%"  # noqa: PLR2004  # from there on two digits are whole percents


def clipped_text(cost: Cost | None) -> str:
    """The shares that are cut off at the lower and at the upper end."""
    return "" if cost is None else f"{share(cost.below)}, {share(cost.above)}"


def ends(pick: Pick) -> str:
    """The smallest and the largest value seen."""
    found = pick.sketch
    return "" if found is None or found.empty else f"[{found.low.min():.4g}, {found.high.max():.4g}]"


def range_text(params: QParams | None) -> str:
    """What scale and zero point can represent."""
    return "" if params is None else f"[{params.range.low.min():.4g}, {params.range.high.max():.4g}]"


def method_text(pick: Pick) -> str:
    """The method, and for auto what it came to."""
    return f"{pick.method}: {pick.like}" if pick.like else pick.method


def head(picks: Picks) -> str:
    """How many tensors there are, and on how many samples."""
    stats = picks.stats
    on = f"on {counted(stats.samples, 'sample')} in {counted(stats.blocks, 'block')}"
    where = printable(str(picks.path or "statistics"))
    if not picks.model:
        return f"{where}: {counted(len(stats.targets), 'tensor')} {on}"
    return f"{picks.model}: {counted(len(picks.picks), 'tensor')} with statistics of {where}, {on}"


def _legend(picks: Picks) -> str:
    if not picks.model:
        return "Histograms: heights are logarithmic; the axis is linear for 99.9% of magnitudes, logarithmic beyond."
    return (
        "Histograms: heights are logarithmic; [ ] is the range, outside of which values are clipped; the axis is"
        " logarithmic beyond its larger end. SQNR is estimated, for each tensor by itself."
    )


@dataclass(frozen=True, slots=True)
class _Histograms:
    """The table, which leaves out columns from the right, and says so, until names and histograms have room."""

    picks: Sequence[Pick]
    known: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = [printable(str(one.tensor)) for one in self.picks]
        columns = self._columns()
        longest = max(map(len, [*names, "tensor"]))
        room = options.max_width - min(longest, NAME) - BARS - GAP
        kept: list[tuple[str, list[str]]] = []
        left: list[tuple[str, list[str]]] = []
        for title, cells in columns:
            room -= max(len(text) for text in (*cells, title)) + GAP
            (kept if room >= 0 and not left else left).append((title, cells))
        used = sum(max(len(text) for text in (*cells, title)) + GAP for title, cells in kept)
        width = max(BARS, min(WIDEST, options.max_width - used - GAP - min(longest, options.max_width // 3)))
        table = Listing("tensor", "histogram", *(title for title, _ in kept), right=("SQNR", "NaN", "inf"))
        for row, one in enumerate(self.picks):
            drawn = _drawn(one, width, ascii_only=options.ascii_only)
            table.add_row(names[row], drawn, *(cells[row] for _, cells in kept))
        yield table
        if left:
            yield plain(f"For more columns ({', '.join(title for title, _ in left)}) widen the terminal.", style="dim")

    def _columns(self) -> list[tuple[str, list[str]]]:
        """The columns behind tensor and histogram, those that matter most first."""
        if not self.known:
            seen = [one.sketch for one in self.picks]
            return [
                ("seen", [ends(one) for one in self.picks]),
                ("values", [f"{one.count:,}" if one else "" for one in seen]),
                ("NaN", [str(one.nan or "") if one else "" for one in seen]),
                ("inf", [str(one.inf or "") if one else "" for one in seen]),
            ]
        return [
            ("SQNR", [sqnr_text(one.cost) for one in self.picks]),
            ("clipped", [clipped_text(one.cost) for one in self.picks]),
            ("range", [range_text(one.params) for one in self.picks]),
            ("method", [method_text(one) for one in self.picks]),
            ("seen", [ends(one) for one in self.picks]),
            ("type", [one.params.type.name if one.params else "" for one in self.picks]),
            ("rule", [printable(one.rule) for one in self.picks]),
        ]


def _drawn(one: Pick, width: int, *, ascii_only: bool) -> Text:
    if one.sketch is None:
        return Text("")
    left, middle, right = line(one.sketch, one.params, width, ascii_only=ascii_only)
    return Text.assemble((left, "red"), middle, (right, "red"))
