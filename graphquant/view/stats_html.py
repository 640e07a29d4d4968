"""Statistics as one page that works from disk: no script, nothing fetched, light or dark, printable."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from graphquant.errors import printable
from graphquant.view import svg
from graphquant.view.stats_text import BY_NAME, clipped_text, ends, head, method_text, range_text, share, sqnr_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphquant.picked import Other, Pick, Picks
    from graphquant.sketch import Cost

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5b6470;--line:#dfe3e8;--back:#fff;--band:#e3ecfa;--bar:#3667b0;
--cut:#c2410c;--warn:#8a5a00}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa4b0;--line:#343a42;--back:#15181c;--band:#20304a;
--bar:#7ba7e8;--cut:#fb8a4c;--warn:#e0b050}}
@media print{:root{color-scheme:light;--ink:#000;--soft:#444;--line:#ccc;--back:#fff;--band:#e3ecfa;--bar:#3667b0;
--cut:#c2410c;--warn:#8a5a00}section,tr{break-inside:avoid}
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

Column = tuple[str, str]
"""A title, and the class of its cells."""


def page(picks: Picks) -> str:
    """The whole page; the same statistics give the same bytes."""
    return "\n".join(_page(picks)) + "\n"


def _page(picks: Picks) -> Iterator[str]:
    title = _text(picks.model or str(picks.path or "statistics"))
    yield "<!DOCTYPE html>"
    yield f'<html lang="en"><head><meta charset="utf-8"><title>{title}: statistics</title>'
    yield f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1">'
    yield f"<style>{STYLE}{svg.STYLE}</style></head><body>"
    yield f"<h1>{title}</h1>"
    yield f"<p>{_text(head(picks))}.</p>"
    yield from _warnings(picks)
    yield f'<p class="soft">{_text(_legend(picks))}</p>'
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
    if picks.by_name:
        yield f"<p>{_text(BY_NAME)}</p>"


def _legend(picks: Picks) -> str:
    said = "Heights are values per bar on a log scale. The axis is linear "
    if not picks.model:
        return said + "for 99.9% of magnitudes and logarithmic beyond."
    return said + (
        "up to the larger end of the range and logarithmic beyond. The band is the range; what is outside of it is"
        " clipped. SQNR is estimated from the histogram, for each tensor by itself; the tensor that loses most comes"
        " first. Methods are shown with their default arguments."
    )


def _table(picks: Picks) -> Iterator[str]:
    known = bool(picks.model)
    columns: list[Column] = [("tensor", "name"), ("histogram", "")]
    columns += (
        [("SQNR, dB", "right"), ("clipped low, high", ""), ("range", ""), ("type", ""), ("method", ""), ("rule", "")]
        if known
        else [("seen", ""), ("values", "right"), ("NaN", "right"), ("inf", "right")]
    )
    yield '<div class="scroll"><table><thead><tr>'
    yield "".join(f'<th class="{kind}">{title}</th>' for title, kind in columns)
    yield "</tr></thead><tbody>"
    for number, one in enumerate(picks.picks):
        link = f'<a href="#t{number}">{_text(str(one.tensor))}</a>'
        drawn = svg.small(one.sketch, one.params) if one.sketch else ""
        cells = [link, drawn, *map(_text, _cells(one) if known else _counts(one))]
        shown = (f'<td class="{kind}">{cell}</td>' for cell, (_, kind) in zip(cells, columns, strict=True))
        yield f"<tr>{''.join(shown)}</tr>"
    yield "</tbody></table></div>"


def _cells(one: Pick) -> Sequence[str]:
    dtype = one.params.type.name if one.params else ""
    return sqnr_text(one.cost), clipped_text(one.cost), range_text(one.params), dtype, method_text(one), one.rule


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
        yield svg.channels(one.sketch, one.params)
    elif one.sketch is not None and one.sketch.counts.size:
        params = one.params if one.params is not None and one.params.axis is None else None
        yield svg.histogram(one.sketch, params, _rows(one))
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
    if one.params is not None:
        params = one.params
        per = f" for each of {params.scale.size} channels" if params.axis is not None else ""
        scale = "" if per else f" with scale {float(params.scale):.6g} and zero point {int(params.zero_point)}"
        yield f"{params.type.name}{per}{scale}, range {range_text(params)}"
    if one.cost is not None:
        yield f"clipped {share(one.cost.below)} below and {share(one.cost.above)} above"
        yield f"SQNR {sqnr_text(one.cost)}" + ("" if sqnr_text(one.cost) == "exact" else " dB")
    if one.method:
        yield f"picked by {method_text(one)}" + (f", rule {one.rule}" if one.rule else "")


def _rows(one: Pick) -> list[svg.Row]:
    """What each method would pick; first what the tensor has, where it is not what its method picks by itself."""
    rows = [(other.method, other.params, _words(other.cost), _same(one, other)) for other in one.others]
    if one.params is None or not rows or any(own for *_, own in rows):
        return rows
    return [("chosen", one.params, _words(one.cost), True), *rows]


def _same(one: Pick, other: Other) -> bool:
    """Whether the tensor's scale and zero point are those that its method picks by itself."""
    chosen = one.params
    return (
        chosen is not None
        and other.method == one.method.partition(" ")[0]
        and bool(chosen.scale == other.params.scale and chosen.zero_point == other.params.zero_point)
    )


def _words(cost: Cost | None) -> str:
    unit = "" if sqnr_text(cost) == "exact" else " dB"
    return "" if cost is None else f"{sqnr_text(cost)}{unit}, {share(cost.clipped)} clipped"


def _text(what: str) -> str:
    return escape(printable(what))
