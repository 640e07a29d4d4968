"""Real models outside of the repository, and the mark of tests that need them."""

from pathlib import Path

import pytest

SHARED_MODELS = Path(__file__).resolve().parents[3] / "shared" / "models"
NO_SHARED_MODELS = "the folder of shared models does not exist"
"""The reason of a skip, which `--fail-on-skips` allows."""

needs_shared_models = pytest.mark.skipif(not SHARED_MODELS.is_dir(), reason=NO_SHARED_MODELS)
