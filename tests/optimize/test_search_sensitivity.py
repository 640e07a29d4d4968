"""Sensitivities of tensors in the validation after a search."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import graphquant as gq
from graphquant.analysis.comparison import Comparison, SiteFigures
from graphquant.analysis.validation import Bounds, Validation
from graphquant.visualize.compare_report import validation_view
from graphquant.visualize.json_export import InsertResult

if TYPE_CHECKING:
    from pathlib import Path


def test_the_validation_has_the_sensitivities(samples: Path, tmp_path: Path) -> None:
    """Report and output rank the tensors of the chosen plan by sensitivity, as compare measures it.

    Only tensors that the search measured alone have one, the largest errors first.
    """
    model, data, out = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz", tmp_path / "out.onnx"
    result = gq.insert(model, data=str(data), min_sqnr=55)
    result.save(out)
    sites = InsertResult.of(result).as_json()["validation"]["comparison"]["sites"]
    message = "\n".join(map(str, validation_view(result.validation)))
    sites = [site for site in sites if site["sensitivity_db"] is not None]
    sensitivities = [site["sensitivity_db"] for site in sites]
    assert sensitivities
    assert sensitivities == sorted(sensitivities)
    assert f"highest sensitivity: {sites[0]['tensor']} {sensitivities[0]:.1f} dB" in message
    assert "of single tensors" not in message
    measured = {entry.tensor: entry.sensitivity for entry in gq.compare(model, out, str(data), sensitivity=True).sites}
    assert measured.keys() >= {site["tensor"] for site in sites}
    # Measured on other samples, with the rules' plan for all other sites. Local errors are 20 dB larger.
    assert sensitivities == pytest.approx([measured[site["tensor"]] for site in sites], abs=8)


def test_without_a_search_biases_are_not_listed() -> None:
    """Without sensitivities, tensors are ranked by their local errors, without biases."""
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
    assert ": weight:0 40.0 dB" in str(validation_view(check)[-1])


def test_biases_are_told(samples: Path) -> None:
    """Biases are what is rounded to 32 bits."""
    result = gq.insert(samples / "digits_cnn.onnx", data=str(samples / "digits_cnn_calib.npz"))
    sites = result.validation.comparison.sites
    assert sorted(site.tensor for site in sites if site.bias) == sorted(
        site.tensor for site in sites if "bias" in site.rule
    )
    assert not {entry.tensor for entry in result.validation.worst_sites if "bias" in entry.rule}
    assert sum(site.bias for site in sites) >= 2
