"""What strip gave back, and whether it is what it should be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from graphquant.errors import printable
from graphquant.view.diff_text import diff_view

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.pipeline import Proof, Stripped


def stripped_view(found: Stripped, written: Path | None) -> RenderableType:
    """What was taken out, what is rounded, and what is left."""
    parts = [Text(printable(note), style="yellow") for note in found.notes]
    parts += [Text(printable(f"left: {tensor}: {why}"), style="yellow") for tensor, why in found.left]
    said = f"{_counted(len(found.ops), 'op')} taken out"
    if found.exact:
        said = "The source model, bit for bit"
    elif found.weights:
        first = ", ".join(str(tensor.op) for tensor, _ in found.weights[:3])
        more = f" and {len(found.weights) - 3} more" if len(found.weights) > 3 else ""  # noqa: PLR2004  # a line
        said += f"; {_counted(len(found.weights), 'weight')} dequantized, with the rounding they had: {first}{more}"
    parts.append(Text(printable(f"{said}." + (f" Written to {written}" if written else "")), style="bold"))
    return Group(*parts)


def proof_view(proof: Proof, original: str) -> RenderableType:
    """Whether it is the original, or that but for what."""
    if proof.equal:
        return Text(printable(f"Checked: it is {original}, message for message."), style="bold")
    parts: list[RenderableType] = [diff_view(proof.other, stat=False)] if proof.other else []
    if proof.holds:
        said = f"Checked: it is {original}"
        said += f" as it was prepared ({proof.steps})" if proof.steps else ""
        said += f", but for the rounding of {_counted(proof.rounded, 'weight')}." if proof.rounded else "."
        parts.append(Text(printable(said), style="bold"))
    return Group(*parts)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
