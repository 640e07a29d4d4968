"""The one setting of a runtime that decides whether results come out the same each time."""

from __future__ import annotations

import os

ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
"""What switches the kernels of oneDNN in TensorFlow, which round by where memory happens to lie."""

OFF = "0"


def repeatable() -> None:
    """Has TensorFlow, where it is imported after this, run without them, unless somebody said otherwise."""
    os.environ.setdefault(ONEDNN, OFF)


def asked() -> str:
    """What is asked for of them; results with and without them differ."""
    return os.environ.get(ONEDNN, OFF)
