"""The page of a batch in a browser: sorting, filtering, links, colors, and escaping of names."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import graphquant as gq
from graphquant.batch.reports import write_report
from graphquant.batch.types import Digests, Outcome, OutcomeMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from graphquant.batch.types import BatchReport

pytestmark = pytest.mark.slow


@pytest.fixture
def open_page_in_browser(browser: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a page in a color scheme, and check at the end that no page had a problem.

    Problems are messages on the console, errors, dialogs, and requests for other addresses.
    """
    contexts, problems = [], []

    def open_page(path: Path, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": 1200, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: None if request.url.startswith("file:") else problems.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems


def _report_of_300_models(report: BatchReport) -> BatchReport:
    """Return a report of 300 models with random figures, and the original ones among them."""
    rng = random.Random(7)  # noqa: S311  # not for cryptography
    outcomes = []
    for number in range(300 - len(report.outcomes)):
        before = int(10 ** rng.uniform(3, 8))
        outcome = replace(
            report.outcomes[0],
            name=f"zoo/family{number % 9}/model_{number:03}.onnx",
            status="done" if number % 3 else "unchanged",
            size_before=before,
            size_after=int(before * rng.uniform(0.26, 0.9)),
            sites=rng.randrange(1, 400),
            int8_ops=(rng.randrange(0, 50), 50),
            metrics=OutcomeMetrics(sqnr=rng.uniform(12, 60), samples=8) if number % 10 else OutcomeMetrics(exact=True),
            seconds=rng.uniform(0.1, 90),
        )
        outcomes.append(outcome)
    return replace(report, outcomes=(*outcomes[:3], *report.outcomes, *outcomes[3:]))


def _column_values(page: Any, column: int) -> list[str]:
    cells = f"[...document.querySelectorAll('#models > tbody > tr')].filter(r => !r.hidden).map(r => r.cells[{column}]"
    return page.evaluate(f"{cells}.dataset.v)")


@pytest.fixture
def large_page(report_of_each_status: BatchReport, tmp_path: Path) -> Path:
    """Write and return the page of 300 models."""
    path = tmp_path / "report.html"
    write_report(path, _report_of_300_models(report_of_each_status))
    return path


def test_every_model_has_a_row(
    large_page: Path, open_page_in_browser: Callable[..., Any], report_of_each_status: BatchReport
) -> None:
    """Each model has a row, in the manifest's order, and names are escaped."""
    page = open_page_in_browser(large_page)
    assert _column_values(page, 0)[3:6] == ["net", "kept", "gated"]
    assert len(_column_values(page, 0)) == 300
    assert page.locator("#shown").inner_text() == "300 of 300 shown"
    assert page.locator("script").count() == 1
    failed = page.locator("tr[data-status=failed]").first
    assert "<script>alert(1)</script>" in failed.inner_text()
    assert "no model. Mend it." in failed.inner_text()
    assert report_of_each_status.outcomes[2].misses[0].message in page.locator("tr[data-status=gate]").inner_text()


def test_sorting(large_page: Path, open_page_in_browser: Callable[..., Any]) -> None:
    """Columns sort by number in both directions, with empty cells last."""
    page = open_page_in_browser(large_page)
    for column in range(2, 9):
        head = page.locator("#models > thead th").nth(column)
        head.locator("button").click()
        ascending = _column_values(page, column)
        assert head.get_attribute("aria-sort") == "ascending"
        numbers = [float(value) for value in ascending if value]
        assert numbers == sorted(numbers)
        assert len(numbers) > 290
        assert not any(ascending[len(numbers) :])
        head.locator("button").click()
        descending = _column_values(page, column)
        assert head.get_attribute("aria-sort") == "descending"
        assert [float(value) for value in descending if value] == sorted(numbers, reverse=True)
        assert not any(descending[len(numbers) :])


def test_sorting_by_name(large_page: Path, open_page_in_browser: Callable[..., Any]) -> None:
    """Names sort as text, and only the sorted column has aria-sort."""
    page = open_page_in_browser(large_page)
    page.locator("thead button", has_text="status").click()
    page.locator("thead button", has_text="model").click()
    names = _column_values(page, 0)
    assert names == sorted(names)
    assert page.locator("th[aria-sort=ascending]").count() == 1


def test_filtering(large_page: Path, open_page_in_browser: Callable[..., Any]) -> None:
    """Filters by words of the name and by status combine."""
    page = open_page_in_browser(large_page)
    page.locator("#query").fill("family3 MODEL_")
    names = _column_values(page, 0)
    assert len(names) == 33
    assert all("family3" in name for name in names)
    page.locator("#query").fill("")
    page.locator("#status").select_option("gate")
    assert _column_values(page, 0) == ["gated"]
    assert page.locator("#shown").inner_text() == "1 of 300 shown"
    page.locator("#status").select_option("changed")
    assert _column_values(page, 0) == ["net", "kept"]


def test_color_schemes(large_page: Path, open_page_in_browser: Callable[..., Any]) -> None:
    """The page has the system's color scheme, and the button selects the other one."""
    background = "getComputedStyle(document.body).backgroundColor"
    for scheme, first, second in (
        ("light", "rgb(255, 255, 255)", "rgb(21, 24, 28)"),
        ("dark", "rgb(21, 24, 28)", "rgb(255, 255, 255)"),
    ):
        page = open_page_in_browser(large_page, scheme)
        assert page.evaluate(background) == first
        page.locator("#theme").click()
        assert page.evaluate(background) == second


def test_page_fits_1200_pixels(large_page: Path, open_page_in_browser: Callable[..., Any]) -> None:
    """The page does not scroll sideways at 1200 pixels."""
    page = open_page_in_browser(large_page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200


def test_details_unfold(large_page: Path, open_page_in_browser: Callable[..., Any]) -> None:
    """A model's row unfolds to paths, digests and findings."""
    page = open_page_in_browser(large_page)
    row = page.locator("tr[data-status=gate]")
    row.locator("summary").click()
    row_text = row.inner_text()
    for text in ("models/gated.onnx", "d" * 64, "GQ102 then/conv 1", "it runs in float. Remedy: mend it."):
        assert text in row_text


def test_links_lead_to_graphs(
    report_of_each_status: BatchReport, tmp_path: Path, samples: Path, open_page_in_browser: Callable[..., Any]
) -> None:
    """Each existing output is drawn once, next to the report, and the link opens its page."""
    output = tmp_path / "out put#1.onnx"
    gq.insert(samples / "digits_cnn.onnx", rules=["weight_only"]).save(output)
    outcome = Outcome(
        name="digits & co#1",
        model="digits.onnx",
        output=str(output),
        status="done",
        digests=Digests(output="1" * 64),
        size_after=1,
    )
    missing = replace(outcome, name="gone", output=str(tmp_path / "gone.onnx"))
    events: list[tuple[str, int, int]] = []
    path = tmp_path / "the report.html"
    linked_report = replace(report_of_each_status, outcomes=(outcome, missing), changes=())
    write_report(path, linked_report, lambda *event: events.append(event))
    assert events == [("drawing", 1, 1)]
    (graph_page,) = (tmp_path / "the report_graphs").iterdir()
    before = graph_page.stat().st_mtime_ns
    write_report(path, linked_report)
    assert graph_page.stat().st_mtime_ns == before
    page = open_page_in_browser(path)
    assert page.locator("td a").count() == 1
    page.locator("td a").click()
    page.wait_for_url(graph_page.as_uri())
    assert page.evaluate("typeof viewer") == "object"
    write_report(path, replace(linked_report, outcomes=(replace(outcome, digests=Digests(output="2" * 64)),)))
    assert len([*graph_page.parent.iterdir()]) == 2


def test_no_link_without_a_model(report_of_each_status: BatchReport, tmp_path: Path) -> None:
    """An output that is not a model has no link, and the report is written."""
    output = tmp_path / "net.onnx"
    output.write_bytes(b"nothing")
    outcome = replace(report_of_each_status.outcomes[0], output=str(output))
    write_report(tmp_path / "report.html", replace(report_of_each_status, outcomes=(outcome,)))
    assert "<a href" not in (tmp_path / "report.html").read_text("utf-8")


def test_narrow_windows(large_page: Path, open_page_in_browser: Callable[..., Any]) -> None:
    """At each width nothing is cut off, headings are aligned with their columns, and filtered rows are hidden."""
    page = open_page_in_browser(large_page)
    for width in (1200, 800, 600):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        right_edges = "r => [...r.cells].slice(2, 9).map(c => Math.round(c.getBoundingClientRect().right))"
        heads, first = (
            page.evaluate(f"({right_edges})(document.querySelector('#models > {part} > tr'))")
            for part in ("thead", "tbody")
        )
        assert heads == first
    page.locator("#query").fill("gated")
    assert page.locator("#models > tbody > tr:visible").count() == 1
