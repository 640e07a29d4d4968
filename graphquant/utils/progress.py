"""Progress callbacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

Progress = Callable[[str, int, int], None]
"""Callback with the name of the current stage, the completed units and the total units."""


def stage_progress(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    """Return a callback that reports the completed and total units of the stage `name`, or None without `progress`."""
    return None if progress is None else partial(progress, name)
