"""What went wrong in a batch, a notice each, for code scanning and for annotations; docs/ci.md explains the codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant.backends import CODES
from graphquant.backends.lint import Code
from graphquant.batch.reports.words import reasons, told
from graphquant.view.notices import Notice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.batch.types import Outcome, Report

BATCH_CODES = {
    "GQ201": Code("error", "a model cannot be quantized as asked"),
    "GQ202": Code("error", "a model took longer than it may"),
    "GQ203": Code("error", "the process that quantized a model ended"),
    "GQ204": Code("error", "a model took more memory than it may"),
    "GQ205": Code("error", "an output does not keep a gate"),
    "GQ206": Code("warning", "a model was not begun, for the batch was stopped"),
    "GQ207": Code("warning", "an output is worse than in an earlier report"),
    "GQ208": Code("error", "an output is not what is built of its model now"),
    "GQ209": Code("warning", "an output cannot be compared with its float model"),
}
"""What a batch adds to the codes of `check`."""

ALL_CODES = {**CODES, **BATCH_CODES}
"""Every code that a batch's report can have."""

_BY_STATUS = {
    "failed": "GQ201",
    "timeout": "GQ202",
    "crashed": "GQ203",
    "memory": "GQ204",
    "gate": "GQ205",
    "skipped": "GQ206",
}


def notices(report: Report) -> Iterator[Notice]:
    """Everything that is wrong, model by model; then what changed."""
    for one in report.outcomes:
        if one.status != "skipped" or report.shard[1] == 1:  # another shard's is none of this report's business
            yield from _of_outcome(one)
    paths = {one.name: one.model for one in report.outcomes}
    for change in report.changes:
        if change.level != "note":
            path = paths.get(change.name, change.name)
            code = "GQ208" if change.what == "digest" else "GQ207"
            yield Notice(code, change.level, path, "", "", f"{change.name}: {change.says}.")


def _of_outcome(outcome: Outcome) -> Iterator[Notice]:
    code = _BY_STATUS.get(outcome.status)
    if code is not None:
        level = BATCH_CODES[code].level
        for said in reasons(outcome) or [f"{BATCH_CODES[code].explains}."]:
            yield Notice(code, level, outcome.model, "", "", told(outcome, said))
    elif outcome.fine:
        for said in reasons(outcome):
            yield Notice("GQ209", BATCH_CODES["GQ209"].level, outcome.model, "", "", told(outcome, said))
    for found in outcome.findings:
        says = f"{found.says}. To mend it: {found.fix}."
        yield Notice(found.code, found.level, outcome.output, found.where, found.op, says)
