"""Writing models."""

from pathlib import Path

import pytest

import graphquant as gq
from graphquant.errors import UsageError

MODELS = Path(__file__).parent.parent / "sample_models"


@pytest.mark.parametrize(("source", "target"), [("digits_cnn.onnx", "out.pb"), ("digits_cnn.pb", "out.onnx")])
def test_suffix_of_another_format(tmp_path, source, target):
    """A model is not written under a suffix by which it would be read as something else."""
    with pytest.raises(
        UsageError, match=r"is named like a \w+ model, and this is a \w+ model\. Give it another suffix"
    ):
        gq.save(gq.load(MODELS / source), tmp_path / target)
    assert list(tmp_path.iterdir()) == []
