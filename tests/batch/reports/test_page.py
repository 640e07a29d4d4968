"""The page of a batch in a browser: sorting, filtering, links, colours, and names that want to be markup."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from graphquant import api
from graphquant.batch.reports import write_report
from graphquant.batch.types import Digests, Outcome, OutcomeMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from graphquant.batch.types import BatchReport

pytestmark = pytest.mark.slow


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """A function that opens a page in a colour scheme; no message, error, dialog or foreign request may come of it."""
    contexts, amiss = [], []

    def show(path: Path, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": 1200, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: amiss.append(message.text))
        page.on("pageerror", lambda error: amiss.append(str(error)))
        page.on("dialog", lambda dialog: (amiss.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda one: None if one.url.startswith("file:") else amiss.append(one.url))
        page.goto(path.as_uri())
        return page

    yield show
    for context in contexts:
        context.close()
    assert not amiss


def _many(report: BatchReport) -> BatchReport:
    """300 models, drawn with a fixed seed, with the made-up ones among them."""
    drawn = random.Random(7)  # noqa: S311  # figures to look at
    made = []
    for number in range(300 - len(report.outcomes)):
        before = int(10 ** drawn.uniform(3, 8))
        one = replace(
            report.outcomes[0],
            name=f"zoo/family{number % 9}/model_{number:03}.onnx",
            status="done" if number % 3 else "unchanged",
            size_before=before,
            size_after=int(before * drawn.uniform(0.26, 0.9)),
            sites=drawn.randrange(1, 400),
            int8_ops=(drawn.randrange(0, 50), 50),
            metrics=OutcomeMetrics(sqnr=drawn.uniform(12, 60), samples=8)
            if number % 10
            else OutcomeMetrics(exact=True),
            seconds=drawn.uniform(0.1, 90),
        )
        made.append(one)
    return replace(report, outcomes=(*made[:3], *report.outcomes, *made[3:]))


def _column(page: Any, place: int) -> list[str]:
    cells = f"[...document.querySelectorAll('#models > tbody > tr')].filter(r => !r.hidden).map(r => r.cells[{place}]"
    return page.evaluate(f"{cells}.dataset.v)")


@pytest.fixture
def many(report: BatchReport, tmp_path: Path) -> Path:
    """The page of 300 models."""
    path = tmp_path / "report.html"
    write_report(path, _many(report))
    return path


def test_all_models_are_there(many: Path, opened: Callable[..., Any], report: BatchReport) -> None:
    """A row for each, in the manifest's order; names that want to be markup are text."""
    page = opened(many)
    assert _column(page, 0)[3:6] == ["net", "kept", "gated"]
    assert len(_column(page, 0)) == 300
    assert page.locator("#shown").inner_text() == "300 of 300 shown"
    assert page.locator("script").count() == 1
    failed = page.locator("tr[data-status=failed]").first
    assert "<script>alert(1)</script>" in failed.inner_text()
    assert "no model. Mend it." in failed.inner_text()
    assert "SQNR is 12.0 dB, and 30 were asked for" in page.locator("tr[data-status=gate]").inner_text()


def test_sorting(many: Path, opened: Callable[..., Any]) -> None:
    """By numbers, up and down; what has none is last either way."""
    page = opened(many)
    for place in range(2, 9):
        head = page.locator("#models > thead th").nth(place)
        head.locator("button").click()
        up = _column(page, place)
        assert head.get_attribute("aria-sort") == "ascending"
        numbers = [float(one) for one in up if one]
        assert numbers == sorted(numbers)
        assert len(numbers) > 290
        assert not any(up[len(numbers) :])
        head.locator("button").click()
        down = _column(page, place)
        assert head.get_attribute("aria-sort") == "descending"
        assert [float(one) for one in down if one] == sorted(numbers, reverse=True)
        assert not any(down[len(numbers) :])


def test_sorting_by_name(many: Path, opened: Callable[..., Any]) -> None:
    """By text, and only one column says that it is sorted by."""
    page = opened(many)
    page.locator("thead button", has_text="status").click()
    page.locator("thead button", has_text="model").click()
    names = _column(page, 0)
    assert names == sorted(names)
    assert page.locator("th[aria-sort=ascending]").count() == 1


def test_filtering(many: Path, opened: Callable[..., Any]) -> None:
    """By words of the name and by status, both at once."""
    page = opened(many)
    page.locator("#query").fill("family3 MODEL_")
    found = _column(page, 0)
    assert len(found) == 33
    assert all("family3" in name for name in found)
    page.locator("#query").fill("")
    page.locator("#status").select_option("gate")
    assert _column(page, 0) == ["gated"]
    assert page.locator("#shown").inner_text() == "1 of 300 shown"
    page.locator("#status").select_option("changed")
    assert _column(page, 0) == ["net", "kept"]


def test_colours(many: Path, opened: Callable[..., Any]) -> None:
    """Dark where the system is, the other at a click; text stands out in both."""
    background = "getComputedStyle(document.body).backgroundColor"
    for scheme, first, second in (
        ("light", "rgb(255, 255, 255)", "rgb(21, 24, 28)"),
        ("dark", "rgb(21, 24, 28)", "rgb(255, 255, 255)"),
    ):
        page = opened(many, scheme)
        assert page.evaluate(background) == first
        page.locator("#theme").click()
        assert page.evaluate(background) == second


def test_it_fits_a_narrow_window(many: Path, opened: Callable[..., Any]) -> None:
    """At 1200 pixels nothing has to be scrolled sideways."""
    page = opened(many)
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200


def test_details_unfold(many: Path, opened: Callable[..., Any]) -> None:
    """A model's paths, digests and findings are behind its name."""
    page = opened(many)
    row = page.locator("tr[data-status=gate]")
    row.locator("summary").click()
    shown = row.inner_text()
    for said in ("models/gated.onnx", "d" * 64, "GQ102 then/conv 1", "it runs in float. Remedy: mend it."):
        assert said in shown


def test_links_lead_to_graphs(report: BatchReport, tmp_path: Path, samples: Path, opened: Callable[..., Any]) -> None:
    """The page of each output that is there is drawn beside the report, once, and the link opens it."""
    output = tmp_path / "out put#1.onnx"
    api.insert(samples / "digits_cnn.onnx", rules=["weight_only"]).save(output)
    one = Outcome(
        name="digits & co#1",
        model="digits.onnx",
        output=str(output),
        status="done",
        digests=Digests(output="1" * 64),
        size_after=1,
    )
    gone = replace(one, name="gone", output=str(tmp_path / "gone.onnx"))
    told: list[tuple[str, int, int]] = []
    path = tmp_path / "the report.html"
    made = replace(report, outcomes=(one, gone), changes=())
    write_report(path, made, lambda *what: told.append(what))
    assert told == [("drawing", 1, 1)]
    (drawn,) = (tmp_path / "the report_graphs").iterdir()
    before = drawn.stat().st_mtime_ns
    write_report(path, made)
    assert drawn.stat().st_mtime_ns == before
    page = opened(path)
    assert page.locator("td a").count() == 1
    page.locator("td a").click()
    page.wait_for_url(drawn.as_uri())
    assert page.evaluate("typeof viewer") == "object"
    write_report(path, replace(made, outcomes=(replace(one, digests=Digests(output="2" * 64)),)))
    assert len([*drawn.parent.iterdir()]) == 2


def test_no_link_without_a_model(report: BatchReport, tmp_path: Path) -> None:
    """An output that was changed since has no graph, and the report is written all the same."""
    output = tmp_path / "net.onnx"
    output.write_bytes(b"nothing")
    one = replace(report.outcomes[0], output=str(output))
    write_report(tmp_path / "report.html", replace(report, outcomes=(one,)))
    assert "<a href" not in (tmp_path / "report.html").read_text("utf-8")


def test_a_narrow_window(many: Path, opened: Callable[..., Any]) -> None:
    """Nothing is cut off at the right, heads stand over their numbers, and what is filtered out is gone."""
    page = opened(many)
    for width in (1200, 800, 600):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        places = "r => [...r.cells].slice(2, 9).map(c => Math.round(c.getBoundingClientRect().right))"
        heads, first = (
            page.evaluate(f"({places})(document.querySelector('#models > {part} > tr'))") for part in ("thead", "tbody")
        )
        assert heads == first
    page.locator("#query").fill("gated")
    assert page.locator("#models > tbody > tr:visible").count() == 1
