"""What the check at the end of `insert` found, as lines and as JSON data."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from graphquant.view.compare_text import comparison_json
from graphquant.view.text import counted, listed, plain

if TYPE_CHECKING:
    from rich.console import RenderableType

    from graphquant.accuracy import Ratio
    from graphquant.comparison import Comparison, OutputFigures
    from graphquant.pipeline.budgeting import Fitted
    from graphquant.pipeline.checking import Check
    from graphquant.pipeline.searching import Searched
    from graphquant.pipeline.timing import Timed

WORST = 3
"""Outputs and tensors that are named where all is well."""

NAMED = 6
"""Tensors that are named where something is missed."""

UNCHECKED = "Not checked against the float model. With --data, insert measures what it made."


def check_view(check: Check | None) -> list[RenderableType]:
    """The outputs, the share of multiply-adds in low precision, the tensors that lose most, and what is missed."""
    if check is None:
        return [plain(UNCHECKED, "dim")]
    if check.comparison is None:
        return [plain(f"The check failed: {said}.", "bold red") for said in check.missed]
    lines: list[RenderableType] = [plain(f"{_measured(check, check.comparison)}.")]
    missed, costly = check.missed, check.costly[: NAMED if check.missed else WORST]
    if check.share is not None:
        said = f"  {_percent(check.share)} of {check.multiply_adds:,} multiply-adds have quantized inputs"
        lines.append(plain(said))
    if costly:
        named = [f"{one.tensor} {one.blame if check.blamed else one.local:.1f} dB" for one in costly]
        said = "costing the outputs most, each alone" if check.blamed else "losing most by themselves"
        lines.append(plain(f"  {said}: {listed(named, NAMED)}"))
    lines += [plain(f"missed: {said}.", "bold red") for said in missed]
    if missed:
        said = "  compare lists every tensor; --exclude leaves some float, --method picks other ranges."
        lines.append(plain(said, "red"))
    return lines


def search_view(found: Searched | None) -> list[RenderableType]:
    """What the search did, in a line or two."""
    if found is None or not found.found.plans:
        return []
    doubts = [plain(f"not sure: {doubt}", "yellow") for doubt in found.tried.doubts]
    if not found.left and not found.changed and found.tried.assured:
        shown = " on these samples, which do not show it of others" if doubts else ""
        return [plain(f"Searched: what the rules make meets the bounds{shown}."), *doubts]
    said = f"Searched {counted(found.found.plans, 'plan')}, {found.runs:.1f} runs for each site"
    said += f": {counted(len(found.left), 'site')} left float, and with them {_percent(found.found.cost)} of the cost"
    ways = Counter(found.changed.values())
    said += "".join(f"; {counted(count, 'site')} with {way}" for way, count in sorted(ways.items()))
    lines: list[RenderableType] = [plain(f"{said}."), *doubts]
    if found.found.interrupted:
        lines.append(plain("The search was interrupted; this is the best plan that it had.", "yellow"))
    lines += [plain(f"in the way: {missed} on the samples of the search", "yellow") for missed in found.tried.missed]
    return lines


def fitted_view(found: Fitted | None) -> list[RenderableType]:
    """What was made of weights so that they take few bytes, in a line."""
    if found is None:
        return []
    most = f" of {found.most:,} that they may" if found.most is not None else ", the fewest found that meet the bounds"
    said = f"Constants take {found.size:,} bytes{most}; in float they took {found.whole:,}"
    for way, count in sorted(Counter(found.ways.values()).items()):
        said += f"; {counted(count, 'weight')} in float" if way == "float" else f"; {count} with {way}"
    lines: list[RenderableType] = [plain(f"{said}.")]
    if found.guessed:
        named = listed([str(one) for one in found.guessed], WORST)
        lines.append(plain(f"  judged by their bits alone, since nothing tells what they lose: {named}", "yellow"))
    return lines


def fitted_json(found: Fitted | None) -> dict[str, Any] | None:
    """The same as JSON data; null where there is no budget."""
    if found is None:
        return None
    return {
        "bytes": found.size,
        "budget": found.most,
        "float_bytes": found.whole,
        "ways": [{"tensor": str(tensor), "way": way} for tensor, way in found.ways.items()],
        "guessed": [str(tensor) for tensor in found.guessed],
    }


def search_json(found: Searched | None) -> dict[str, Any] | None:
    """The same as JSON data; null where there was no search."""
    if found is None:
        return None
    return {
        "plans": found.found.plans,
        "interrupted": found.found.interrupted,
        "cost": found.found.cost,
        "runs": found.runs,
        "met": found.met,
        "missed": list(found.tried.missed),
        "doubts": list(found.tried.doubts),
        "left": [{"tensor": str(tensor), "alone": alone} for tensor, alone in found.left.items()],
        "changed": [{"tensor": str(tensor), "way": way} for tensor, way in found.changed.items()],
    }


def timed_view(found: Timed) -> list[RenderableType]:
    """How long a run takes, in a line or two."""
    if found.rules is None or found.outcome is None:
        return [plain("Nothing was timed: there is nothing to quantize.", "dim")]
    said = f"Timed {counted(found.plans, 'plan')} in {found.runtime} on one thread: what the rules make takes"
    said += f" {found.rules.median:.2f} of float's {1000 * found.rules.other / found.samples:.3g} ms"
    if found.outcome is not found.rules:
        said += f", what was made of it {found.outcome.median:.2f}"
    lines: list[RenderableType] = []
    if found.floats:
        lines.append(plain(f"{said}.", "dim"))
        lines.append(plain(f"Nothing is quantized: {found.why}.", "bold yellow"))
        if found.runtime == "TensorFlow":
            lines.append(plain("TensorFlow quantizes beside its float ops; -o NAME.tflite runs on integers.", "yellow"))
    else:
        left = f", with {counted(len(found.left), 'site')} left float" if found.left else ""
        lines.append(plain(f"{said}{left}."))
    if found.interrupted:
        lines.append(plain("Timing was interrupted; this is the fastest plan that there was.", "yellow"))
    return lines


def timed_json(found: Timed | None) -> dict[str, Any] | None:
    """The same as JSON data; null where time was not to be least."""
    if found is None:
        return None
    return {
        "runtime": found.runtime,
        "plans": found.plans,
        "interrupted": found.interrupted,
        "quantized": not found.floats,
        "samples": found.samples,
        "rules": _ratio(found.rules, found.samples),
        "outcome": _ratio(found.outcome, found.samples),
        "left": [str(tensor) for tensor in found.left],
    }


def _ratio(found: Ratio | None, samples: int) -> dict[str, float] | None:
    """Milliseconds for a sample of a model and of float, and how many times as long it takes: low to high, 19 in 20."""
    if found is None:
        return None
    return {
        "ms": 1000 * found.one / samples,
        "float_ms": 1000 * found.other / samples,
        "ratio": found.median,
        "low": found.low,
        "high": found.high,
    }


def check_json(check: Check | None) -> dict[str, Any] | None:
    """The same as JSON data; null where nothing was measured."""
    if check is None:
        return None
    return {
        "met": not check.missed,
        "missed": list(check.missed),
        "reused": check.reused,
        "other_data": check.elsewhere,
        "bounds": {
            "sqnr": check.bounds.sqnr,
            "agreement": check.bounds.agreement,
            "accuracy_drop": check.bounds.drop,
        },
        "multiply_adds": {"low": check.low, "all": check.multiply_adds},
        "comparison": None if check.comparison is None else comparison_json(check.comparison),
    }


def _measured(check: Check, found: Comparison) -> str:
    """On how many samples, and the figures of the worst outputs."""
    used = "used before too, for ranges, corrections or a search" if check.reused else "that calibration did not use"
    used = "of other data than the statistics are of" if check.elsewhere else used
    ranked = sorted(found.outputs, key=lambda one: math.inf if one.sqnr is None else one.sqnr)
    outputs = listed([_output(one) for one in ranked if not one.empty], WORST)
    if empty := [one.name for one in ranked if one.empty]:
        were = "it was" if len(empty) == 1 else "they were"
        said = f"{listed(empty, WORST)} nothing to compare: {were} empty for all {counted(found.samples, 'sample')}"
        outputs = f"{outputs}; {said}" if outputs else said
    return f"Checked on {counted(found.samples, 'sample')} {used}: {outputs}"


def _output(one: OutputFigures) -> str:
    figures = []
    if one.sqnr is not None:
        figures.append({math.inf: "equal", -math.inf: "no SQNR"}.get(one.sqnr, f"{one.sqnr:.1f} dB"))
    if one.agreement is not None:
        figures.append(f"{_percent(one.agreement)} agree")
    if one.accuracy is not None:
        figures.append(f"accuracy {_percent(one.accuracy[0])} to {_percent(one.accuracy[1])}")
    return " ".join([one.name, " and ".join(figures)]) if figures else one.name


def _percent(share: float) -> str:
    """As a percentage that says 100 only where it is all."""
    return f"{math.floor(round(1000 * share, 6)) / 10:g}%"


__all__ = [
    "check_json",
    "check_view",
    "fitted_json",
    "fitted_view",
    "search_json",
    "search_view",
    "timed_json",
    "timed_view",
]
