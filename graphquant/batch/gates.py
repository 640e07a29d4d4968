"""How far an output is from its float model, and which gates do not hold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from graphquant.batch.types import Figures, Miss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.batch.types import Found, Gates
    from graphquant.pipeline import Result


PLACES = 2
"""Decimals of dB that are kept: TensorFlow's kernels of oneDNN round as their memory happens to lie."""


def figures_of(result: Result) -> Figures | None:
    """What the check at the end of `insert` found, as a batch keeps it; None where there was no data for it."""
    if not result.inserted:
        return Figures(exact=True)
    if result.check is None:
        return None
    found = result.check.comparison
    if found is None:
        return Figures(problem=result.check.problem)
    problem = next((f"output {one.name!r}: {one.problem}" for one in found.outputs if one.problem), "")
    problem = "every output was empty for all samples" if found.nothing else problem
    pairs = [one.accuracy for one in found.outputs if one.accuracy is not None]
    return Figures(
        sqnr=round(found.sqnr, PLACES) if found.sqnr is not None and math.isfinite(found.sqnr) else None,
        exact=not problem and all(one.largest == 0 for one in found.outputs),
        agreement=found.agreement,
        accuracy=max(pairs, key=lambda pair: pair[0] - pair[1], default=None),
        samples=found.samples,
        random=found.random,
        problem=problem or ("values are not finite" if found.sqnr == -math.inf else ""),
    )


def misses(gates: Gates, figures: Figures | None, size: int, findings: Sequence[Found]) -> tuple[Miss, ...]:
    """The gates that do not hold, or that nothing can be held against.

    Args:
        gates: The bounds.
        figures: What was measured, None if there was no data.
        size: Bytes of the output.
        findings: What the check found.
    """
    said = {
        "min_sqnr": _sqnr(gates.min_sqnr, figures),
        "min_agreement": _agreement(gates.min_agreement, figures),
        "max_accuracy_drop": _accuracy(gates.max_accuracy_drop, figures),
    }
    if figures is None:
        said = {name: "there is no data to measure it on" if getattr(gates, name) is not None else "" for name in said}
    elif figures.problem:
        said = {name: figures.problem if getattr(gates, name) is not None else "" for name in said}
    if gates.max_size is not None and size > gates.max_size:
        said["max_size"] = f"the output has {size} bytes and may have {gates.max_size}"
    if gates.check is not None and findings:
        codes = ", ".join(dict.fromkeys(one.code for one in findings))
        said["check"] = f"the check found {codes}"
    return tuple(Miss(gate=name, says=what) for name, what in said.items() if what)


def _sqnr(least: float | None, figures: Figures | None) -> str:
    if least is None or figures is None or figures.exact:
        return ""
    if figures.sqnr is None:
        return "no output that differs holds floats"
    return "" if figures.sqnr >= least else f"the worst output has {figures.sqnr:.2f} dB and needs {least:g}"


def _agreement(least: float | None, figures: Figures | None) -> str:
    if least is None or figures is None or figures.exact:
        return ""
    if figures.agreement is None:
        return "no output holds class scores or integers"
    found = 100 * figures.agreement
    return "" if found >= least else f"{found:.2f}% agree and {least:g}% must"


def _accuracy(most: float | None, figures: Figures | None) -> str:
    if most is None or figures is None or figures.exact:
        return ""
    if figures.accuracy is None:
        return "the data has no labels that an output can be held against"
    before, after = (100 * share for share in figures.accuracy)
    fine = before - after <= most + 1e-9  # the shares are rounded
    return "" if fine else f"accuracy fell from {before:.2f}% to {after:.2f}%, by more than {most:g}"


__all__ = ["figures_of", "misses"]
