"""The plans that shipped rule files make, as text that a review can read."""

import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("write_golden", Path(__file__).with_name("write_golden.py"))
write_golden = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(write_golden)


@pytest.mark.parametrize(("rules", "model"), write_golden.CASES)
def test_plan(rules, model):
    """A rule file plans for a sample model what its golden file says; write_golden.py writes it anew."""
    assert write_golden.planned(rules, model) == write_golden.golden(rules, model).read_text("utf-8")
