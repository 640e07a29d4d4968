"""Which rules of a plan matched nothing, as far as that is worth a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant.ruleset import load_ruleset
from graphquant.ruleset import shipped as files
from graphquant.view.text import counted, plain

if TYPE_CHECKING:
    from rich.console import RenderableType

    from graphquant.plans import Plan


def unused_view(plan: Plan, *, shipped: bool) -> list[RenderableType]:
    """The user's own rules that matched nothing by name, and where asked how many of the shipped ones.

    Shipped rules are for many models, so that of each model most of them find nothing, which is no mistake.
    """
    if not plan.unused:
        return []
    known = files()
    theirs = {rule.rule.name for rule in load_ruleset([name for name in plan.rules if name in known]).rules}
    own = [name for name in plan.unused if name not in theirs]
    rest = len(plan.unused) - len(own)
    lines: list[RenderableType] = []
    if own:
        lines.append(plain(f"Your rules that matched nothing: {', '.join(own)}", "yellow"))
    if rest and shipped:
        lines.append(plain(f"{counted(rest, 'shipped rule')} matched nothing; --format json names them.", "dim"))
    return lines


__all__ = ["unused_view"]
