"""Make TensorFlow's results reproducible by disabling oneDNN (docs/decisions/0071-onednn.md)."""

from __future__ import annotations

import os

ONEDNN_VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
"""Environment variable that enables TensorFlow's oneDNN kernels. Their rounding depends on memory alignment."""

ONEDNN_OFF = "0"


def disable_onednn() -> None:
    """Disable oneDNN in a TensorFlow that is imported later, unless the user has set the variable."""
    os.environ.setdefault(ONEDNN_VARIABLE, ONEDNN_OFF)


def onednn_setting() -> str:
    """Return the setting in effect. Results with and without oneDNN differ."""
    return os.environ.get(ONEDNN_VARIABLE, ONEDNN_OFF)
