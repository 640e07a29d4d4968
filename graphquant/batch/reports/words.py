"""An outcome in words: what cells of tables and lines of reports say, the same in each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant.view.text import counted

if TYPE_CHECKING:
    from graphquant.batch.types import Figures, Outcome, Report

STATUSES = {
    "done": "done",
    "unchanged": "unchanged",
    "failed": "failed",
    "gate": "gate missed",
    "timeout": "timed out",
    "crashed": "crashed",
    "memory": "out of memory",
    "skipped": "not begun",
}
"""Each status in words."""


def status(outcome: Outcome) -> str:
    """What became of it."""
    return STATUSES[outcome.status]


def size(count: int | None) -> str:
    """Bytes in the unit that reads best: `512 B`, `52.1 KB`, `1.31 GB`."""
    if count is None:
        return ""
    value, units = float(count), iter(("B", "KB", "MB", "GB"))
    unit = next(units)
    for larger in units:
        if value < 999.5:  # noqa: PLR2004  # what three figures can show
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


def ratio(outcome: Outcome) -> float | None:
    """The output's size as a share of the model's."""
    before, after = outcome.size_before, outcome.size_after
    return after / before if after is not None and before else None


def percent(share: float | None) -> str:
    """A share as whole percents, 100 % only where nothing is missing; many times the whole as such."""
    if share is None:
        return ""
    if share >= 10:  # noqa: PLR2004  # from where on percents have four figures
        return f"{share:.0f} x"
    whole = round(share * 100)
    return f"{min(whole, 99) if share < 1 else whole} %"


def decibels(figures: Figures | None) -> str:
    """The SQNR, or that nothing differs."""
    if figures is None:
        return ""
    if figures.sqnr is None:
        return "exact" if figures.exact else ""
    return f"{figures.sqnr:.1f} dB"


def time(outcome: Outcome) -> str:
    """How long it took; nothing where nothing was done."""
    return seconds(outcome.seconds) if outcome.seconds else ""


def seconds(count: float) -> str:
    """A duration: `0.8 s`, `3 min 20 s`."""
    if count < 60:  # noqa: PLR2004  # seconds of a minute
        return f"{count:.1f} s"
    minutes, rest = divmod(round(count), 60)
    return f"{minutes} min {rest} s"


INT8 = "int8: how many of the ops that compute run on integers, as `graphquant check` foretells; see docs/check.md."
"""What the column of that name says."""


def reasons(outcome: Outcome) -> list[str]:
    """Why it is not fine: the error, or each gate that does not hold; and why its figures cannot be had."""
    said = [outcome.problem.says] if outcome.problem is not None else []
    said += [miss.says for miss in outcome.misses]
    problem = "" if outcome.figures is None else outcome.figures.problem
    return said if not problem or problem in said else [*said, f"it cannot be compared with the float model: {problem}"]


def told(outcome: Outcome, said: str) -> str:
    """A reason with the model's name before it, which many begin with already."""
    begins = next((name for name in (outcome.name, outcome.model) if said.startswith(name)), None)
    return f"{outcome.name}: {said}" if begins is None else outcome.name + said.removeprefix(begins)


def summary(report: Report) -> str:
    """The report in a line: how many models, how many of each status, how long."""
    counts: dict[str, int] = {}
    for one in report.outcomes:
        counts[status(one)] = counts.get(status(one), 0) + 1
    parts = [f"{counts[word]} {word}" for word in STATUSES.values() if word in counts]
    worse = [one.what for one in report.changes if one.level != "note"]
    unlike = worse.count("digest")
    parts += [counted(len(worse) - unlike, "regression")] if len(worse) > unlike else []
    parts += [counted(unlike, "difference")] if unlike else []
    shard = f" of shard {report.shard[0]}/{report.shard[1]}" if report.shard[1] > 1 else ""
    return f"{counted(len(report.outcomes), 'model')}{shard}: {', '.join(parts)}; {seconds(report.seconds)}."
