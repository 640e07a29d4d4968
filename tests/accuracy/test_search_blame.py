"""What tensors cost the outputs, in the check behind a search."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import graphquant as gq
from graphquant.comparison import Comparison, SiteFigures
from graphquant.pipeline.checking import Bounds, Check
from graphquant.view.measured import check_json, check_view

if TYPE_CHECKING:
    from pathlib import Path


def test_the_check_has_the_blame(samples: Path, tmp_path: Path) -> None:
    """Report and output rank tensors of the plan that was found by their blame, which is what compare measures."""
    model, data, out = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz", tmp_path / "out.onnx"
    result = gq.insert(model, data=str(data), min_sqnr=55)
    result.save(out)
    sites = check_json(result.check)["comparison"]["sites"]
    said = "\n".join(map(str, check_view(result.check)))
    blames = [one["blame"] for one in sites]
    assert len(blames) > 3
    assert blames == sorted(blames)
    assert f"costing the outputs most, each alone: {sites[0]['tensor']} {blames[0]:.1f} dB" in said
    assert "by themselves" not in said
    measured = {one.tensor: one.blame for one in gq.compare(model, out, str(data), blame=True).sites}
    assert measured.keys() == {one["tensor"] for one in sites}
    # on other samples, and where all else is as the rules say; by themselves all lose 20 dB more
    assert blames == pytest.approx([measured[one["tensor"]] for one in sites], abs=8)


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
    found = Comparison(samples=4, random=False, outputs=(), sites=(bias, weight, exact), labels="")
    check = Check(comparison=found, reused=False, bounds=Bounds())
    assert check.costly == (weight,)
    assert not check.blamed
    assert "losing most by themselves: weight:0 40.0 dB" in str(check_view(check)[-1])


def test_biases_are_told(samples: Path) -> None:
    """Biases are what is rounded to 32 bits."""
    result = gq.insert(samples / "digits_cnn.onnx", data=str(samples / "digits_cnn_calib.npz"))
    sites = result.check.comparison.sites
    assert sorted(one.tensor for one in sites if one.bias) == sorted(one.tensor for one in sites if "bias" in one.rule)
    assert not {one.tensor for one in result.check.costly if "bias" in one.rule}
    assert sum(one.bias for one in sites) >= 2
