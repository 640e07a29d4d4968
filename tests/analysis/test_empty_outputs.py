"""Outputs that have no elements: nothing is compared, and nothing is met."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx.parser
import pytest

import graphquant as gq
from graphquant.analysis.validation import Bounds
from graphquant.batch.work import outcome_metrics
from graphquant.errors import UsageError
from graphquant.visualize.compare_report import validation_view
from graphquant.visualize.json_results import CompareResult

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXT = """
<ir_version: 8, opset_import: ["" : 13]>
net (float[N, 4] x) => (float[N, 4] y, float[M] found, int64[K, 2] places)
{
  y = MatMul(x, w)
  large = Greater(x, limit)
  where = NonZero(large)
  places = Transpose<perm=[1, 0]>(where)
  found = GatherND(y, places)
}
"""

ONLY = TEXT.replace("float[N, 4] y, ", "")


@pytest.fixture
def selecting_net(tmp_path: Path) -> Callable[..., tuple[Path, str]]:
    """Write a model that returns the values whose inputs are above a limit, with 20 samples; return both paths."""

    def write(text: str, limit: float) -> tuple[Path, str]:
        rng = np.random.default_rng(0)
        model = onnx.parser.parse_model(text)
        for name, values in (("w", rng.normal(size=(4, 4))), ("limit", np.array(limit))):
            model.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), name))
        onnx.save(model, tmp_path / "net.onnx")
        np.savez(tmp_path / "data.npz", x=rng.normal(size=(20, 4)).astype(np.float32))
        return tmp_path / "net.onnx", str(tmp_path / "data.npz")

    return write


def text_report(result: Any) -> str:
    """The lines of the check."""
    return "\n".join(map(str, validation_view(result.validation)))


def test_one_empty_output(selecting_net: Callable[..., tuple[Path, str]]) -> None:
    """An output without values is neither equal nor measured; with a bound it is a caveat."""
    model, data = selecting_net(TEXT, 1e6)
    result = gq.insert(model, data=data)
    y, scores, indices = result.validation.comparison.outputs
    assert (y.values, scores.values, indices.values, scores.empty, y.empty) == (16, 0, 0, True, False)
    assert (scores.sqnr, scores.cosine, scores.agreement, indices.agreement, scores.sqnr_lower_bound) == (None,) * 5
    assert re.search(r"\bfound, places .*empty", text_report(result))
    assert "equal" not in text_report(result)
    assert result.validation.failures == ()
    outputs = CompareResult.model_validate(result.validation.comparison).as_json()["outputs"]
    assert [output["equal"] for output in outputs[1:]] == [False, False]
    bound = replace(result.validation, bounds=Bounds(min_sqnr=20))
    assert any("'found'" in caveat for caveat in bound.caveats)


def test_all_outputs_empty(
    selecting_net: Callable[..., tuple[Path, str]], cli: Callable[..., Any], tmp_path: Path
) -> None:
    """If nothing was compared, no bound is met: in the validation, in a search, in compare and in a batch."""
    model, data = selecting_net(ONLY, 1e6)
    out = tmp_path / "out.onnx"
    result = gq.insert(model, data=data)
    result.save(out)
    assert len(result.validation.failures) == 1
    assert result.validation.comparison.all_empty
    assert not outcome_metrics(result).exact
    assert outcome_metrics(result).problem
    with pytest.raises(UsageError, match=r"empty for all \d+"):
        gq.insert(model, data=data, min_sqnr=20)
    plain = json.loads(cli("compare", model, out, "--data", data, "--format", "json").stdout)
    assert plain["samples"] == 20
    assert [(output["values"], output["sqnr"]) for output in plain["outputs"]] == [(0, None)] * len(plain["outputs"])
    bounded = cli("compare", model, out, "--data", data, "--min-sqnr", 20, code=1)
    assert "empty for all 20" in bounded.stderr


def test_output_with_values_for_some_samples(selecting_net: Callable[..., tuple[Path, str]]) -> None:
    """An output with values for one sample is compared on this sample."""
    model, data = selecting_net(ONLY, -1e6)
    (scores, indices) = gq.insert(model, data=data).validation.comparison.outputs
    assert (scores.values, indices.values) == (16, 32)
    assert scores.sqnr > 20
    assert indices.agreement == 1.0
