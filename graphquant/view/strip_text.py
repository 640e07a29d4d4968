"""What strip gave back, and whether it is what it should be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from graphquant.view.diff_text import diff_view
from graphquant.view.text import counted, plain

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.pipeline import Proof, Stripped


def stripped_view(found: Stripped, written: Path | None) -> RenderableType:
    """What was taken out, what is rounded, and what is left."""
    parts = [plain(note, "yellow") for note in found.notes]
    parts += [plain(f"left: {tensor}: {why}", "yellow") for tensor, why in found.left]
    said = f"{counted(len(found.ops), 'op')} taken out"
    if found.exact:
        said = "The source model, bit for bit"
    elif found.weights:
        first = ", ".join(str(tensor.op) for tensor, _ in found.weights[:3])
        more = f" and {len(found.weights) - 3} more" if len(found.weights) > 3 else ""  # noqa: PLR2004  # a line
        said += f"; {counted(len(found.weights), 'weight')} dequantized, with the rounding they had: {first}{more}"
    parts.append(plain(f"{said}." + (f" Written to {written}" if written else ""), "bold"))
    return Group(*parts)


def proof_view(proof: Proof, original: str) -> RenderableType:
    """Whether it is the original, or that but for what."""
    if proof.equal:
        return plain(f"Checked: it is {original}, message for message.", "bold")
    parts: list[RenderableType] = [diff_view(proof.other, stat=False)] if proof.other else []
    if proof.holds:
        said = f"Checked: it is {original}"
        said += f" as it was prepared ({proof.steps})" if proof.steps else ""
        said += f", but for the rounding of {counted(proof.rounded, 'weight')}." if proof.rounded else "."
        parts.append(plain(said, "bold"))
    return Group(*parts)
