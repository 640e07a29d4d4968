"""Statistics by themselves as one page that works from disk: no script, nothing fetched, light or dark, printable.

Beside a model they are drawn on it; see `graphquant.view.graph`.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from graphquant.errors import printable
from graphquant.view import svg
from graphquant.view.stats_text import ends, head

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphquant.picked import Pick, Picks

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5b6470;--line:#dfe3e8;--back:#fff;--bar:#3667b0;
--warn:#8a5a00}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa4b0;--line:#343a42;--back:#15181c;
--bar:#7ba7e8;--warn:#e0b050}}
@media print{:root{color-scheme:light;--ink:#000;--soft:#444;--line:#ccc;--back:#fff;--bar:#3667b0;
--warn:#8a5a00}section,tr{break-inside:avoid}
.scroll{overflow:visible!important}table{font-size:9px!important}th,td{white-space:normal!important;
padding-right:.4rem!important}td.name{min-width:0!important}svg.small{width:80px!important}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
body{margin:2rem auto;max-width:70rem;padding:0 1rem;font:14px/1.45 system-ui,sans-serif;color:var(--ink);
background:var(--back)}
h1{font-size:1.3rem}h2{font:600 .95rem ui-monospace,monospace;margin:0 0 .3rem}h1,h2,td.name{overflow-wrap:anywhere}
a{color:inherit}p{margin:.4rem 0}.soft{color:var(--soft)}.warn{color:var(--warn)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13px}
td.name{font-family:ui-monospace,monospace;min-width:11rem}
th,td{text-align:left;padding:.2rem .7rem .2rem 0;border-bottom:1px solid var(--line);white-space:nowrap;
font-variant-numeric:tabular-nums}td.name{white-space:normal}
th.right,td.right{text-align:right}
section{border-top:1px solid var(--line);margin-top:1.6rem;padding-top:.9rem}section svg{width:100%;height:auto}
svg.small{width:120px;height:20px;vertical-align:middle}
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What the page may load: nothing."""

LEGEND = "Heights are values per bar on a log scale. The axis is linear for 99.9% of magnitudes and logarithmic beyond."

COLUMNS = (("tensor", "name"), ("histogram", ""), ("seen", ""), ("values", "right"), ("NaN", "right"), ("inf", "right"))
"""Titles, and the classes of their cells."""


def page(picks: Picks) -> str:
    """The whole page; the same statistics give the same bytes."""
    return "\n".join(_page(picks)) + "\n"


def _page(picks: Picks) -> Iterator[str]:
    title = _text(str(picks.path or "statistics"))
    yield "<!DOCTYPE html>"
    yield f'<html lang="en"><head><meta charset="utf-8"><title>{title}: statistics</title>'
    yield f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1">'
    yield f"<style>{STYLE}{svg.STYLE}</style></head><body>"
    yield f"<h1>{title}</h1>"
    yield f"<p>{_text(head(picks))}.</p>"
    yield from _warnings(picks)
    yield f'<p class="soft">{LEGEND}</p>'
    yield from _table(picks)
    for number, one in enumerate(picks.picks):
        yield from _section(number, one)
    yield "</body></html>"


def _warnings(picks: Picks) -> Iterator[str]:
    stats = picks.stats
    if stats.random:
        yield '<p class="warn">The data is RANDOM: what it shows is for tests only.</p>'
    if not stats.complete:
        total = sum(run.samples for run in stats.runs)
        yield f'<p class="warn">The statistics are of {stats.samples} of {total} samples of the data.</p>'


def _table(picks: Picks) -> Iterator[str]:
    yield '<div class="scroll"><table><thead><tr>'
    yield "".join(f'<th class="{kind}">{title}</th>' for title, kind in COLUMNS)
    yield "</tr></thead><tbody>"
    for number, one in enumerate(picks.picks):
        link = f'<a href="#t{number}">{_text(str(one.tensor))}</a>'
        drawn = svg.small(one.sketch) if one.sketch else ""
        cells = [link, drawn, *map(_text, _counts(one))]
        shown = (f'<td class="{kind}">{cell}</td>' for cell, (_, kind) in zip(cells, COLUMNS, strict=True))
        yield f"<tr>{''.join(shown)}</tr>"
    yield "</tbody></table></div>"


def _counts(one: Pick) -> Sequence[str]:
    found = one.sketch
    return (ends(one), f"{found.count:,}", str(found.nan), str(found.inf)) if found else ("", "", "", "")


def _section(number: int, one: Pick) -> Iterator[str]:
    yield f'<section id="t{number}"><h2>{_text(str(one.tensor))}</h2>'
    facts = list(_facts(one))
    if facts:
        yield f"<p>{_text('; '.join(facts))}.</p>"
    if one.note:
        yield f'<p class="warn">{_text(one.note)}</p>'
    if one.sketch is not None and one.sketch.low.ndim:
        yield svg.channels(one.sketch)
    elif one.sketch is not None and one.sketch.counts.size:
        yield svg.histogram(one.sketch)
    elif one.sketch is not None:
        yield '<p class="soft">No histogram was kept.</p>'
    yield "</section>"


def _facts(one: Pick) -> Iterator[str]:
    found = one.sketch
    if found is not None:
        yield f"{found.count:,} values" + (f" in {ends(one)}" if ends(one) else ", none finite")
        for count, what in ((found.nan, "NaN"), (found.inf, "infinite")):
            if count:
                yield f"{count:,} {what}"


def _text(what: str) -> str:
    return escape(printable(what))
