"""Words that several verbs use for what they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is."""

Several = str | Path | Sequence[str | Path]
"""A name or several."""

__all__ = ["Progress", "Several"]
