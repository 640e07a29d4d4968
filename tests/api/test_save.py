"""Writing models."""

from pathlib import Path

import pytest

import graphquant as gq
from graphquant.errors import UsageError

MODELS = Path(__file__).parents[2] / "sample_models"


@pytest.mark.parametrize(("source", "target"), [("digits_cnn.onnx", "out.pb"), ("digits_cnn.pb", "out.onnx")])
def test_suffix_of_another_format(tmp_path, source, target):
    """A model is not written under a suffix by which it would be read as something else."""
    with pytest.raises(UsageError, match=r"has the suffix '\.\w+'"):
        gq.save(gq.load(MODELS / source), tmp_path / target)
    assert list(tmp_path.iterdir()) == []
