"""Words that several verbs use for what they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is."""

NameOrNames = str | Path | Sequence[str | Path]
"""A name or several."""


def stage_progress(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    """What tells `progress` how much of the stage `name` is done; None where nobody listens."""
    return None if progress is None else partial(progress, name)
