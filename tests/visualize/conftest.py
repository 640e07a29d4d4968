"""Pages of the viewer in the browser."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def wait(page: Any, expression: str) -> None:
    """Waits until the expression is true; playwright's own way evaluates text in the page, which its policy forbids."""
    end = time.monotonic() + 20
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.02)


@pytest.fixture
def until() -> Callable[[Any, str], None]:
    """A function that waits until an expression is true in a page."""
    return wait


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """A function that opens a page of the viewer, at a link and in a color scheme; at the end nothing may be amiss.

    Amiss is a message on the console, an error, a dialog, and anything that is fetched but the file itself.
    """
    contexts, amiss = [], []

    def show(path: Path, op: str = "", scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": 1300, "height": 820}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: amiss.append(message.text))
        page.on("pageerror", lambda error: amiss.append(str(error)))
        page.on("dialog", lambda dialog: (amiss.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda one: None if one.url.startswith(path.as_uri()) else amiss.append(one.url))
        page.goto(path.as_uri() + (f"#op={quote(op, safe='')}" if op else ""))
        wait(page, "performance.getEntriesByName('drawn').length > 0")
        return page

    yield show
    for context in contexts:
        context.close()
    assert not amiss
