"""What tensors cost the outputs, in the check behind a search."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import graphquant as gq
from graphquant.analysis import Comparison, SiteFigures
from graphquant.analysis.validation import Bounds, Validation
from graphquant.visualize.validation_report import validation_json, validation_view

if TYPE_CHECKING:
    from pathlib import Path


def test_the_check_has_the_blame(samples: Path, tmp_path: Path) -> None:
    """Report and output rank tensors of the plan that was found by their blame, which is what compare measures."""
    model, data, out = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz", tmp_path / "out.onnx"
    result = gq.insert(model, data=str(data), min_sqnr=55)
    result.save(out)
    sites = validation_json(result.validation)["comparison"]["sites"]
    message = "\n".join(map(str, validation_view(result.validation)))
    blames = [planned_site["blame"] for planned_site in sites]
    assert len(blames) > 3
    assert blames == sorted(blames)
    assert f"costing the outputs most, each alone: {sites[0]['tensor']} {blames[0]:.1f} dB" in message
    assert "by themselves" not in message
    measured = {entry.tensor: entry.sensitivity for entry in gq.compare(model, out, str(data), sensitivity=True).sites}
    assert measured.keys() == {planned_site["tensor"] for planned_site in sites}
    # on other samples, and where all else is as the rules say; by themselves all lose 20 dB more
    assert blames == pytest.approx([measured[planned_site["tensor"]] for planned_site in sites], abs=8)


def test_without_a_search_biases_are_not_named() -> None:
    """Where no blame was measured, tensors go by what they lose themselves, but for biases; none has a blame."""
    bias, weight, exact = (
        SiteFigures(
            graph="",
            op=name,
            tensor=f"{name}:0",
            rule="r",
            parameter=True,
            local=local,
            accumulated=local,
            bias=name == "bias",
        )
        for name, local in (("bias", 5.0), ("weight", 40.0), ("exact", float("inf")))
    )
    comparison = Comparison(samples=4, random=False, outputs=(), sites=(bias, weight, exact), labels="")
    check = Validation(comparison=comparison, reuses_samples=False, bounds=Bounds())
    assert check.worst_sites == (weight,)
    assert not check.has_sensitivity
    assert "losing most by themselves: weight:0 40.0 dB" in str(validation_view(check)[-1])


def test_biases_are_told(samples: Path) -> None:
    """Biases are what is rounded to 32 bits."""
    result = gq.insert(samples / "digits_cnn.onnx", data=str(samples / "digits_cnn_calib.npz"))
    sites = result.validation.comparison.sites
    assert sorted(planned_site.tensor for planned_site in sites if planned_site.bias) == sorted(
        planned_site.tensor for planned_site in sites if "bias" in planned_site.rule
    )
    assert not {entry.tensor for entry in result.validation.worst_sites if "bias" in entry.rule}
    assert sum(planned_site.bias for planned_site in sites) >= 2
