"""Fixtures that open pages of the viewer in the browser."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def wait_until(page: Any, expression: str) -> None:
    """Wait until the expression is true. Playwright's own function evaluates text, which the page's policy forbids."""
    end = time.monotonic() + 120
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.02)


def wait_for_drawing(page: Any) -> None:
    """Wait until the page has drawn what it was asked to, which is in the next frame of the browser."""
    page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


@pytest.fixture
def drawn() -> Callable[[Any], None]:
    """Return the function that waits for the next drawing."""
    return wait_for_drawing


@pytest.fixture
def until() -> Callable[[Any, str], None]:
    """Return a function that waits until an expression is true in a page."""
    return wait_until


@pytest.fixture
def open_viewer(browser: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a page of the viewer, and check at the end that no page had a problem.

    Problems are messages on the console, errors, dialogs, and requests for anything but the file itself.
    """
    contexts, problems = [], []

    def open_page(path: Path, op: str = "", scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": 1300, "height": 820}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
        page.on(
            "request", lambda request: None if request.url.startswith(path.as_uri()) else problems.append(request.url)
        )
        page.goto(path.as_uri() + (f"#op={quote(op, safe='')}" if op else ""))
        wait_until(page, "performance.getEntriesByName('drawn').length > 0")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems
