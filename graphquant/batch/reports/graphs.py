"""Each output drawn as a page beside the report, so that the report can lead there."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from graphquant import __version__
from graphquant.errors import GraphQuantError, UsageError
from graphquant.whole import whole

if TYPE_CHECKING:
    from graphquant.batch.types import Outcome, Report
    from graphquant.pipeline import Progress

LONGEST = 80
"""Characters of a model's name that are in its page's name."""


def draw_graphs(report: Report, beside: Path, progress: Progress | None = None) -> dict[str, str]:
    """Draws every output that is a file here into a folder beside the report, where it is not drawn already.

    Args:
        report: The report.
        beside: Where the report will be.
        progress: Is told how many are drawn.

    Returns:
        The address of each page, relative to the report, by the model's name.

    Raises:
        UsageError: The folder cannot be written.
    """
    folder = beside.with_name(f"{beside.stem}_graphs")
    drawn = [one for one in report.outcomes if one.digests.output and _is_here(one)]
    links: dict[str, str] = {}
    for done, one in enumerate(drawn):
        page = folder / _file(one)
        if page.is_file() or _draw(one, page):
            links[one.name] = f"{quote(folder.name)}/{quote(page.name)}"
        if progress is not None:
            progress("drawing", done + 1, len(drawn))
    return links


def _is_here(outcome: Outcome) -> bool:
    return "://" not in outcome.output and Path(outcome.output).exists()


def _file(outcome: Outcome) -> str:
    """A name that changes with what is drawn and with who draws it."""
    made_of = f"{outcome.name}\0{outcome.digests.output}\0{__version__}"
    mark = hashlib.sha256(made_of.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', outcome.name)[:LONGEST].strip('._')}-{mark}.html"


def _draw(outcome: Outcome, page: Path) -> bool:
    """Draws an output; tells whether that was possible, for it may have been changed since."""
    from graphquant import pipeline
    from graphquant.view.graph import model_drawing
    from graphquant.view.html import page as made_page
    from graphquant.view.payload import payload

    try:
        drawing = model_drawing(pipeline.load(Path(outcome.output)))
    except GraphQuantError:
        return False
    try:
        page.parent.mkdir(exist_ok=True)
        with whole(page) as file:
            file.write(made_page(payload(drawing, [])).encode())
    except OSError as error:
        raise UsageError(f"{page} cannot be written: {error.strerror}. Put the report elsewhere.") from error
    return True
