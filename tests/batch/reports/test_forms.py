"""Formats of a batch report: schemas, content and escaping."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest
import xmlschema
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batch_reports import report_without_times
from support.json_schemas import report_schema
from support.published_schemas import validate_sarif

from graphquant.batch.reports import REPORTS, as_annotations, check_report_path, html, text, write_report
from graphquant.batch.reports.text import ALL_CODES, BATCH_CODES, batch_report_view, bytes_text, percent_text
from graphquant.batch.types import (
    BatchReport,
    GateMiss,
    Outcome,
    OutcomeChange,
    OutcomeMetrics,
    Problem,
    parse_json,
    read_report,
    record_json,
)
from graphquant.errors import UsageError
from graphquant.visualize.tables import Column, make_console, render_text

HERE = Path(__file__).parent
XSD = xmlschema.XMLSchema(HERE / "junit.xsd")
SHIPPED = HERE.parents[2] / "graphquant" / "batch" / "reports" / "report.schema.json"


def test_json_matches_its_schema(report_of_each_status, tmp_path):
    """JSON has exactly the keys of the shipped schema, and reading it returns the same report."""
    path = tmp_path / "report.json"
    write_report(path, report_of_each_status)
    data = json.loads(path.read_text("utf-8"))
    schema = json.loads(SHIPPED.read_text("utf-8"))
    jsonschema.validate(data, schema, cls=jsonschema.Draft202012Validator)
    assert read_report(path) == report_of_each_status
    data["outcomes"][0]["status"] = "good"
    with pytest.raises(jsonschema.ValidationError, match=r"'good' .*'unchanged'"):
        jsonschema.validate(data, schema)


def test_json_without_times(report_of_each_status):
    """JSON without times has no field that differs between runs."""
    later_report = replace(
        report_of_each_status,
        started=1.0,
        seconds=2.0,
        outcomes=tuple(replace(outcome, seconds=3.0, attempts=4) for outcome in report_of_each_status.outcomes),
        changes=tuple(change for change in report_of_each_status.changes if change.kind != "seconds"),
    )
    assert later_report.changes != report_of_each_status.changes
    assert report_without_times(report_of_each_status) == report_without_times(later_report)
    assert record_json(report_of_each_status) != record_json(later_report)


def test_warnings_are_in_each_form(report_of_each_status, tmp_path):
    """Each form but CSV, which has a row for each model, has the warning about an entry without models."""
    warning = "graphquant.toml:4: this entry gets no model"
    report = replace(report_of_each_status, warnings=(warning,))
    for suffix, write in REPORTS.items():
        assert ("this entry gets no model" in write(report)) == (suffix != ".csv"), suffix
    assert warning in render_text(batch_report_view(report))
    assert f"file=graphquant.toml,title=GQ212::{warning}" in as_annotations(report)


def test_random_data_is_named(report_of_each_status):
    """Text, Markdown and HTML say which figures come from random data, and have no such column otherwise."""
    outcome = report_of_each_status.outcomes[0]
    drawn = replace(outcome, metrics=OutcomeMetrics(sqnr=46.5, samples=8, random=True))
    tables = [
        render_text(batch_report_view(replace(report_of_each_status, outcomes=outcomes)))
        for outcomes in ((outcome,), (outcome, drawn))
    ]
    assert ["random" in table.split() for table in tables] == [False, True]


def test_shipped_schema_is_up_to_date():
    """The shipped schema equals that of the types. `python tests/batch/reports/write_schema.py` updates it."""
    assert json.loads(SHIPPED.read_text("utf-8")) == report_schema()


def _no_descriptions(node, where=""):
    if not isinstance(node, dict):
        return
    for name, entry in node.get("properties", {}).items():
        if "description" not in entry and "Found" not in where:  # whose one sentence names all of its fields
            yield f"{where}.{name}"
    for name, inner in node.get("$defs", {}).items():
        yield from _no_descriptions(inner, name)


def test_schema_describes_every_key():
    """Every key of the schema has a description."""
    assert list(_no_descriptions(report_schema())) == []


def test_junit_matches_its_schemas(report_of_each_status):
    """JUnit XML is valid, and has a case for each model and each missing model, with correct counts."""
    xml = REPORTS[".xml"](report_of_each_status)
    XSD.validate(xml)
    (suite,) = ET.fromstring(xml)  # noqa: S314  # our own
    cases = suite.findall("testcase")
    assert len(cases) == len(report_of_each_status.outcomes) + 1
    tags_by_name = {case.get("name"): [child.tag for child in case] for case in cases}
    assert [
        tags_by_name[name] for name in ("net", "kept", "gated", "timeout", "crashed", "memory", "later", "old")
    ] == [
        ["failure"],
        [],
        ["failure"],
        ["error"],
        ["error"],
        ["error"],
        ["skipped"],
        ["failure"],
    ]
    counted = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    assert counted == {"tests": 9, "failures": 4, "errors": 3, "skipped": 1}
    (regression,) = cases[0]
    assert regression.get("type") == "regression"
    assert regression.get("message") == "SQNR is 38.2 dB, and was 42.0 dB"


def test_output_that_differs_from_the_rebuild(report_of_each_status):
    """An output that differs from its rebuild is a difference, not a regression, and fails."""
    unlike = replace(
        report_of_each_status, changes=(replace(report_of_each_status.changes[0], kind="digest", message="it differs"),)
    )
    (suite,) = ET.fromstring(REPORTS[".xml"](unlike))  # noqa: S314  # our own
    assert suite.find("testcase[@name='net']/failure").attrib == {"type": "difference", "message": "it differs"}
    assert re.search(r"\b1 difference; 2 min", suite.findtext("system-out"))


@pytest.mark.parametrize("suffix", [".md", ".html", ".sarif", ".xml"])
def test_output_that_cannot_be_compared(report_of_each_status, suffix):
    """Each format reports an output that cannot be compared, unless a gate reports it."""
    lost = OutcomeMetrics(samples=8, problem="values are NaN")
    done, unchanged, gated = report_of_each_status.outcomes[:3]
    missed = (GateMiss(gate="min_sqnr", message="values are NaN"),)
    outcomes = (replace(done, metrics=lost), unchanged, replace(gated, metrics=lost, misses=missed))
    text = REPORTS[suffix](replace(report_of_each_status, outcomes=outcomes, changes=()))
    assert len(re.findall(rf"float model\S* {lost.problem}", text)) == 1
    assert not re.search(r"float model\S* \w", REPORTS[suffix](report_of_each_status))


def test_markdown_distinguishes_differences_and_regressions(report_of_each_status):
    """Differences found by --verify are not called regressions."""
    unlike = replace(
        report_of_each_status,
        changes=(replace(report_of_each_status.changes[0], kind="digest", message="it is unlike"),),
    )
    text = REPORTS[".md"](unlike)
    assert "- **net** differs: it is" in text
    assert "regressed" not in text


def test_junit_of_regressions_that_do_not_fail(report_of_each_status):
    """A regression with level warning does not fail its case."""
    mild = replace(
        report_of_each_status,
        changes=tuple(replace(result, level="warning") for result in report_of_each_status.changes),
    )
    (suite,) = ET.fromstring(REPORTS[".xml"](mild))  # noqa: S314  # our own
    assert suite.find("testcase[@name='net']").findall("*") == []
    assert suite.get("failures") == "2"
    assert "net: SQNR is 38.2 dB" in suite.findtext("system-err")


def test_sarif_matches_its_schema(report_of_each_status):
    """SARIF matches the published schema, and has each failure, finding and regression."""
    log = json.loads(REPORTS[".sarif"](report_of_each_status))
    validate_sarif(log)
    (run,) = log["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == list(ALL_CODES)
    levels = [(result["ruleId"], result["level"]) for result in run["results"]]
    assert levels == [
        ("GQ205", "error"),
        ("GQ102", "warning"),
        ("GQ201", "error"),
        ("GQ202", "error"),
        ("GQ203", "error"),
        ("GQ204", "error"),
        ("GQ206", "warning"),
        ("GQ207", "error"),
        ("GQ207", "error"),
    ]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    finding = run["results"][1]["locations"][0]
    assert finding["physicalLocation"]["artifactLocation"]["uri"] == "models/gated.quant.onnx"
    assert finding["logicalLocations"][0]["fullyQualifiedName"] == "then/conv 1"


def test_sarif_of_a_shard(report_of_each_status):
    """SARIF has no results for skipped models of other shards."""
    log = json.loads(REPORTS[".sarif"](replace(report_of_each_status, shard=(1, 2))))
    assert "GQ206" not in {result["ruleId"] for result in log["runs"][0]["results"]}


def test_annotations(report_of_each_status):
    """Each annotation is one line, with special characters escaped."""
    *lines, end = as_annotations(report_of_each_status).split("\n")
    assert end == ""
    assert len(lines) == 9
    (miss,) = report_of_each_status.outcomes[2].misses
    assert lines[0] == f"::error file=models/gated.onnx,title=GQ205::gated: {miss.message}"
    for line in lines:
        assert re.match(r"::(error|warning|notice) file=[^:,\n]*,title=GQ\d{3}::[^\n\r]+$", line)


def test_markdown(report_of_each_status, hostile_name):
    """Failures come first, each model has a complete row, and names are escaped."""
    text = REPORTS[".md"](report_of_each_status)
    assert text.startswith("### ❌ graphquant batch\n\n8 models&#58; 1 done, 1 unchanged, 1 failed, 1 gate missed,")
    assert "2 regressions" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(report_of_each_status.outcomes)
    assert {row.count("|") for row in rows} == {10}
    assert "| net | done | 52.1 KB | 17.3 KB | 33 % | 24 | 87 % | 38.2 dB | 1.2 s |" in rows
    assert rows[2].startswith("| gated | **gate missed** |")
    assert "**old** regressed" in text
    assert "<script>" not in text
    assert "alert(1)</" not in text


def test_an_added_column_is_in_every_output(report_of_each_status, monkeypatch):
    """One more entry in REPORT_COLUMNS is a column of the text, Markdown, HTML and CSV."""
    votes = Column("votes", lambda outcome: len(outcome.name) + 0.25, "{:.0f} of 9".format, number=True)
    columns = (*text.REPORT_COLUMNS, votes)
    for module in (text, html):
        monkeypatch.setattr(module, "REPORT_COLUMNS", columns)
    outcomes = replace(report_of_each_status, outcomes=report_of_each_status.outcomes[:2])
    lines = render_text(batch_report_view(outcomes)).splitlines()
    assert [line.split()[-3:] for line in lines[1:3]] == [["3", "of", "9"], ["4", "of", "9"]]
    assert REPORTS[".csv"](outcomes).splitlines()[1].endswith(",1.25,3.25")
    assert "| 1.2 s | 3 of 9 |" in REPORTS[".md"](outcomes)
    page = REPORTS[".html"](outcomes)
    assert '<td class="n" data-v="3.25">3 of 9</td>' in page
    assert "repeat(8,minmax(" in page


def test_markdown_fits_a_step_summary(report_of_each_status):
    """Markdown is below GitHub's limit of 1 MiB, with the number of omitted rows."""
    failed = report_of_each_status.outcomes[3]
    many = tuple(replace(failed, name=f"{number}{'x' * 100}") for number in range(8_000))
    text = REPORTS[".md"](replace(report_of_each_status, outcomes=many))
    assert len(text.encode()) < 1 << 20
    omitted = [int(count) for count in re.findall(r"^(\d+) more are in the other reports", text, re.MULTILINE)]
    rows = sum(line.startswith("| ") for line in text.splitlines()) - 2
    assert omitted[1] + rows == len(many)


def test_markdown_of_a_good_report(report_of_each_status):
    """The heading of a report without failures shows success."""
    good = replace(report_of_each_status, outcomes=report_of_each_status.outcomes[:2], changes=())
    text = REPORTS[".md"](good)
    assert text.startswith("### ✅ graphquant batch\n\n2 models&#58; 1 done, 1 unchanged; 2 min 4 s.")


def test_text(report_of_each_status, capsys):
    """The terminal's table has a row for each model, followed by reasons and a summary line."""
    make_console().print(batch_report_view(report_of_each_status))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == [
        "net",
        "done",
        "52.1",
        "KB",
        "17.3",
        "KB",
        "33",
        "%",
        "24",
        "87",
        "%",
        "38.2",
        "dB",
        "1.2",
        "s",
    ]
    assert f"gated: {report_of_each_status.outcomes[2].misses[0].message}" in lines
    assert f"net: {report_of_each_status.changes[0].message}" in lines
    total, *counts = re.split(r"[:,;] ", lines[-1])
    assert total == "8 models"
    assert counts[:4] == ["1 done", "1 unchanged", "1 failed", "1 gate missed"]
    assert counts[4:8] == ["1 timed out", "1 crashed", "1 out of memory", "1 not started"]
    assert counts[8:] == ["2 regressions", "2 min 4 s."]


def test_empty_report_in_every_format(report_of_each_status, tmp_path):
    """A batch without models has a report in each format."""
    empty = replace(report_of_each_status, outcomes=(), changes=())
    for suffix in REPORTS:
        path = tmp_path / f"empty{suffix}"
        write_report(path, empty)
        assert path.stat().st_size


def test_formats_are_deterministic(report_of_each_status):
    """Each format of one report is reproducible."""
    for form in REPORTS.values():
        assert form(report_of_each_status) == form(report_of_each_status)


def test_unknown_suffix(tmp_path):
    """An unknown suffix raises UsageError with the known ones."""
    with pytest.raises(UsageError, match=r"'\.htm', .* \.json, \.xml,"):
        check_report_path(tmp_path / "report.htm")


def test_writing_to_a_missing_folder(report_of_each_status, tmp_path):
    """A missing folder is created; if a file has its name, writing raises UsageError."""
    write_report(tmp_path / "new" / "folder" / "report.json", report_of_each_status)
    assert read_report(tmp_path / "new" / "folder" / "report.json") == report_of_each_status
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        write_report(tmp_path / "file" / "report.json", report_of_each_status)


def test_statuses_have_labels_and_codes(report_of_each_status):
    """Every finding code appears in SARIF for some status."""
    unlike = replace(report_of_each_status, changes=(replace(report_of_each_status.changes[0], kind="digest"),))
    done = replace(report_of_each_status.outcomes[0], metrics=OutcomeMetrics(problem="values are NaN"))
    empty = replace(report_of_each_status.outcomes[3], status="empty")
    doubtful = replace(report_of_each_status.outcomes[1], data_warnings=("all values are equal",))
    lost = replace(report_of_each_status, outcomes=(done, empty, doubtful), changes=())
    codes = {
        result["ruleId"]
        for variant in (replace(report_of_each_status, warnings=("graphquant.toml:1: unused",)), unlike, lost)
        for result in json.loads(REPORTS[".sarif"](variant))["runs"][0]["results"]
    }
    assert set(BATCH_CODES) <= codes


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, ""), (0.0, "0 %"), (0.996, "99 %"), (1.0, "100 %"), (1.33, "133 %"), (9.99, "999 %"), (5874.9, "5875 x")],
)
def test_percents(share, text):
    """Percentages are rounded down, and large growth is a factor."""
    assert percent_text(share) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, ""),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (52_143, "52.1 KB"),
        (999_600, "1 MB"),
        (1 << 31, "2.15 GB"),
    ],
)
def test_sizes(count, text):
    """Sizes have three digits and the fitting unit."""
    assert bytes_text(count) == text


def test_outcome_without_figures(report_of_each_status):
    """Missing figures are empty cells."""
    bare = Outcome(name="a", model="a.onnx", output="b.onnx", status="done", size_after=10)
    row = REPORTS[".md"](replace(report_of_each_status, outcomes=(bare,), changes=())).splitlines()[-1]
    assert row == "| a | done |  | 10 B |  | 0 |  |  |  |"


def test_terminal_table(monkeypatch):
    """At 80 columns names stay whole, a path is printed once per row, and unchanged models have no time."""
    monkeypatch.setenv("COLUMNS", "80")
    long_name = "models/a_folder/with/a_name_that_is_longer_than/the_column.onnx"
    problem = Problem(kind="ModelError", message=f"{long_name} is no ONNX model. Give one.", exit_code=3)
    outcomes = (
        Outcome(name=long_name, model=long_name, output="a", status="failed", problem=problem),
        Outcome(
            name="b.onnx", model="b.onnx", output="b", status="unchanged", size_before=9, size_after=3, int8_ops=(3, 4)
        ),
    )
    lines = render_text(batch_report_view(BatchReport(version="1", outcomes=outcomes)), folded=True).splitlines()
    assert long_name in lines
    assert [line.split() for line in lines if line.startswith("b.onnx")] == [
        ["b.onnx", "unchanged", "9", "B", "3", "B", "33", "%", "0", "75", "%"]
    ]
    assert f"{long_name} is no ONNX model. Give one." in " ".join(lines)
    assert "".join(lines).count(long_name) == 2
    assert any(line.startswith("int8: ") for line in lines)


@settings(max_examples=60)
@given(name=st.text(st.characters(), min_size=1, max_size=40), message=st.text(st.characters(), max_size=60))
def test_no_text_breaks_a_format(name, message):
    """Any characters in names and messages, with surrogates, give valid UTF-8 and well-formed reports."""
    problem = Problem(kind="ModelError", message=message, exit_code=3)
    outcome = Outcome(name=name, model=name, output=f"{name}.quant", status="failed", problem=problem)
    change = OutcomeChange(name=name, kind="size", level="error", message=message)
    report = BatchReport(version="1", outcomes=(outcome,), changes=(change,))
    texts = {suffix: form(report).encode().decode() for suffix, form in REPORTS.items()}
    XSD.validate(texts[".xml"])
    assert len(json.loads(texts[".sarif"])["runs"][0]["results"]) == 2
    assert parse_json(BatchReport, json.loads(texts[".json"]), "it") == report
    assert len([line for line in texts[".md"].split("\n") if line.startswith("| ")]) == 3
    assert texts[".html"].count("<tr data-status=") == 1
    assert texts[".html"].count("<script") == 1
    assert len(as_annotations(report).split("\n")) == 3
