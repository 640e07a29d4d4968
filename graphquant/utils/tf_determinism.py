"""The one setting of a runtime that decides whether results come out the same each time."""

from __future__ import annotations

import os

ONEDNN_VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
"""What switches the kernels of oneDNN in TensorFlow, which round by where memory happens to lie."""

ONEDNN_OFF = "0"


def disable_onednn() -> None:
    """Has TensorFlow, where it is imported after this, run without them, unless somebody said otherwise."""
    os.environ.setdefault(ONEDNN_VARIABLE, ONEDNN_OFF)


def onednn_setting() -> str:
    """What is asked for of them; results with and without them differ."""
    return os.environ.get(ONEDNN_VARIABLE, ONEDNN_OFF)
