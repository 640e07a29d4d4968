"""Weights within so many bytes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest

import graphquant as gq
from graphquant.errors import UsageError
from graphquant.optimize import candidates, size_budget
from graphquant.optimize.candidates import FLOAT_CANDIDATE, RULE_CANDIDATE, Candidate, ScaleGroup
from graphquant.optimize.selection import allocate_weight_bits
from graphquant.optimize.size_budget import SIZE_BUDGET_RULE, model_constant_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("seed", range(20))
def test_what_is_lost_is_near_the_least(seed: int) -> None:
    """The sizes fit, and what is lost is at most what the best choice loses with the largest step's bytes less."""
    rng = np.random.default_rng(seed)
    some = []
    for index in range(6):
        count, error = int(rng.integers(10, 1000)), float(10 ** rng.uniform(-5, -3))
        candidates = (
            Candidate(name=RULE_CANDIDATE, error=error, size=count),
            Candidate(name="4-bit weights", error=error * rng.uniform(20, 300), size=count / 2),
            Candidate(name=FLOAT_CANDIDATE, error=0.0, size=count * 4),
        )
        some.append(ScaleGroup(sites=(index,), ops=frozenset(), candidates=candidates))
    sizes = [[candidate.size for candidate in group.candidates] for group in some]
    most = sum(min(entry) for entry in sizes) + rng.uniform(0, 1) * sum(max(entry) - min(entry) for entry in sizes)
    step = max(max(entry) - min(entry) for entry in sizes)

    def size(chosen: tuple[int, ...]) -> float:
        return sum(group.candidates[candidate].size for group, candidate in zip(some, chosen, strict=True))

    def lost(chosen: tuple[int, ...]) -> float:
        return sum(group.candidates[candidate].error for group, candidate in zip(some, chosen, strict=True))

    chosen = allocate_weight_bits(some, most)
    assert size(chosen) <= most
    every = list(product(range(3), repeat=6))
    assert lost(chosen) <= min((lost(entry) for entry in every if size(entry) <= most - step), default=np.inf)
    assert size(allocate_weight_bits(some, 0)) == sum(min(entry) for entry in sizes)


def stored_types(path: Path) -> dict[str, int]:
    """The types of initializers and constants in a file, with the bytes that all of each take."""
    model = onnx.load(path)
    stored_weights = [
        *model.graph.initializer,
        *(a.t for n in model.graph.node if n.op_type == "Constant" for a in n.attribute),
    ]
    sizes: dict[str, int] = {}
    for entry in stored_weights:
        name = onnx.TensorProto.DataType.Name(entry.data_type).lower()
        bits = 4 if name.endswith("int4") else 8 * onnx.helper.tensor_dtype_to_np_dtype(entry.data_type).itemsize
        sizes[name] = sizes.get(name, 0) + -(-int(np.prod(entry.dims)) * bits // 8)
    return sizes


@pytest.mark.slow
def test_within_a_budget(samples: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """The file has the reported size within the budget. Fewer bytes lose more, and weights have their reason."""
    model, data = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz"
    errors_seen = []
    for budget in ("19%", "24%", "31%"):
        out, report = tmp_path / f"{budget}.onnx", tmp_path / "report.json"
        output = cli("insert", model, "--data", data, "--size-budget", budget, "-o", out, "--report", report).stdout
        size_report = json.loads(report.read_text())["search"]
        stored_weights = stored_types(out)
        assert (
            sum(stored_weights.values())
            == size_report["size"]["bytes"]
            <= size_report["size"]["budget"]
            == int(float(budget[:-1]) / 100 * 34656)
        )
        assert re.search(f" {size_report['size']['bytes']:,} bytes .* {size_report['size']['budget']:,}", output)
        assert {entry["candidate"] for entry in size_report["changed"]} == (
            {"4-bit weights"} if budget != "31%" else set()
        )
        assert ("int4" in stored_weights) == (budget != "31%")
        errors_seen.append(json.loads(report.read_text())["validation"]["comparison"]["sqnr"])
    assert errors_seen == sorted(errors_seen)
    plan = gq.insert(model, data=str(data), size_budget="24%").plan
    changed = [site for site in plan.sites if site.rule == SIZE_BUDGET_RULE]
    assert {site.scheme.dtype for site in changed} == {"int4"}
    assert all("4 bits" in site.why and "24%" in site.why for site in changed)


def test_without_data(samples: Path) -> None:
    """Weights alone need no data, may stay float, and an absolute size is one."""
    result = gq.insert(samples / "digits_cnn.onnx", rules="weight_only", size_budget="10.3KB")
    assert result.search.max_size == 10300
    assert 10000 < result.search.size <= 10300
    assert result.search.float_tensors
    assert not result.search.changed_tensors
    reasons = {skip.reason for skip in result.plan.skips if skip.rule == SIZE_BUDGET_RULE}
    assert reasons
    assert all("10.3KB" in reason for reason in reasons)


def test_blocks_of_four_and_eight_bits(tmp_path: Path) -> None:
    """Rules for 4 bits get 8 where these reduce the error most for their bytes, and rules for 8 bits get 4."""
    rng = np.random.default_rng(0)
    message = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n,128] x) => (float[n,128] y)'
        " { a = MatMul(x, w1) b = Tanh(a) y = MatMul(b, w2) }"
    )
    for name, spread in (("w1", 0.05), ("w2", 5.0)):
        value = (rng.standard_normal((128, 128)) * spread).astype(np.float32)
        message.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.save(message, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((64, 128)).astype(np.float32))
    for rules, budget in (("weight_only_int4", "28%"), ("weight_only_int8", "22%")):
        data = str(tmp_path / "data.npz")
        result = gq.insert(tmp_path / "m.onnx", rules=rules, size_budget=budget, data=data)
        assert result.search.size <= result.search.max_size
        assert sorted(site.scheme.type.bits for site in result.plan.sites) == [4, 8]


@pytest.mark.parametrize(("length", "form"), [(1, "packed"), (64, "folded")])
def test_form_of_four_bits_for_the_samples(tmp_path: Path, length: int, form: str) -> None:
    """Packed 4-bit products are quick with one row, which the samples tell, and slow with many."""
    rng = np.random.default_rng(0)
    message = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n,t,512] x) => (float[n,t,512] y)'
        " { a = MatMul(x, w1) b = Relu(a) y = MatMul(b, w2) }"
    )
    for name in ("w1", "w2"):
        value = rng.standard_normal((512, 2048) if name == "w1" else (2048, 512)).astype(np.float32)
        message.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.save(message, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((16, length, 512)).astype(np.float32))
    data = str(tmp_path / "data.npz")
    plan = gq.insert(tmp_path / "m.onnx", rules="weight_only_int8", size_budget="15%", data=data).plan
    assert [(site.scheme.type.bits, site.scheme.args.form) for site in plan.sites] == [(4, form), (4, form)]


@pytest.mark.slow
def test_a_weight_of_which_nothing_is_known(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Any]
) -> None:
    """It is not taken for one that loses nothing: it keeps its bits, which is told."""
    options = (
        "insert",
        samples / "digits_cnn.onnx",
        "--data",
        samples / "digits_cnn_calib.npz",
        "--size-budget",
        "24%",
    )
    report = tmp_path / "report.json"
    cli(*options, "-o", tmp_path / "known.onnx", "--report", report)
    size_report = json.loads(report.read_text())["search"]
    assert size_report["size"]["estimated"] == []
    first = next(entry["tensor"] for entry in size_report["changed"] if entry["candidate"] == "4-bit weights")
    measure_sensitivity = candidates.measure_sensitivity

    def without(*args: Any, **more: Any) -> Any:
        sensitivity = measure_sensitivity(*args, **more)
        unknown = first.partition(":")[0].removesuffix("_fused_bn")
        return replace(
            sensitivity, errors={key: entry for key, entry in sensitivity.errors.items() if unknown not in key[1]}
        )

    monkeypatch.setattr(candidates, "measure_sensitivity", without)
    output = cli(*options, "-o", tmp_path / "unknown.onnx", "--report", report).stdout
    size_report = json.loads(report.read_text())["search"]
    assert size_report["size"]["estimated"] == [first]
    assert first not in {entry["tensor"] for entry in size_report["changed"]}
    assert size_report["size"]["bytes"] <= size_report["size"]["budget"]
    assert re.search(f"estimated .*: {first}", output)


@pytest.mark.slow
@pytest.mark.parametrize("much", [0.3, 3.0])
def test_sizes_that_are_not_those_of_the_file(samples: Path, monkeypatch: pytest.MonkeyPatch, much: float) -> None:
    """A fitting plan is found although a candidate is larger than estimated. Only an impossible budget is an error."""
    size = size_budget._weight_bytes
    monkeypatch.setattr(size_budget, "_weight_bytes", lambda *given: int(size(*given) * (1 if given[3] else much)))
    model = samples / "digits_cnn.onnx"
    result = gq.insert(model, rules="weight_only", size_budget="10.3KB")
    assert result.search.size == model_constant_bytes(result.model) <= 10300
    with pytest.raises(UsageError, match="at least") as raised:
        gq.insert(model, rules="weight_only", size_budget="10%")
    least = int(str(raised.value).split("size_budget=")[1].split()[0])
    assert gq.insert(model, rules="weight_only", size_budget=str(least)).search.size == least


def test_weights_that_are_inputs_too(samples: Path) -> None:
    """Initializers of old ONNX, which are inputs as well, are constants of the float model."""
    result = gq.insert(samples / "digits_cnn_bn.onnx", rules="weight_only", size_budget="25%")
    model = onnx.load(samples / "digits_cnn_bn.onnx")
    assert result.search.float_size == sum(
        onnx.numpy_helper.to_array(initializer).nbytes for initializer in model.graph.initializer
    )
    assert 0 < result.search.size <= result.search.float_size // 4


@pytest.mark.slow
def test_weights_in_functions(samples: Path, tmp_path: Path) -> None:
    """They are constants of 4 bits only where an opset has these; rules that want them so raise it."""
    model = samples / "digits_nested.onnx"
    data = str(samples / "digits_nested_calib.npz")
    result = gq.insert(model, data=data, size_budget="24%")
    assert result.search.size <= result.search.max_size
    few = {tensor.graph for tensor, candidate in result.search.changed_tensors.items() if candidate == "4-bit weights"}
    assert few
    assert "sample_models:Block" not in few
    rules = """
        [scheme.few]
        dtype = "int4"
        observe = "absmax"
        [[rule]]
        name = "few"
        consumer = { kind = "conv|matmul|gemm", input = "weight" }
        quantize = "few"
    """
    inserted_result = gq.insert(model, rules=rules, data=data, samples=10)
    assert "sample_models:Block" in {pair.site.tensor.graph for pair in inserted_result.inserted}
    assert inserted_result.model.opset == 21
    assert inserted_result.validation.comparison is not None


@pytest.mark.slow
def test_beside_a_bound(samples: Path) -> None:
    """A search for a bound leaves the weights as the budget made them."""
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    result = gq.insert(model, data=data, size_budget="30%", min_sqnr=44)
    assert {site.tensor: site.scheme.dtype for site in result.plan.sites if site.rule == "size-budget"} == {
        site.tensor: "int4" for site in result.search.plan.sites if site.rule == "size-budget"
    }
    sized = gq.insert(model, data=data, size_budget="30%")
    assert sized.plan.sites != result.plan.sites
    first_uses = {site.uses[0] for site in result.plan.sites}
    assert result.search.sized_weights
    assert result.search.sized_weights <= first_uses


def test_what_cannot_be(samples: Path) -> None:
    """A budget that 4 bits exceed tells the least; of families that keep weights float there is none."""
    with pytest.raises(UsageError, match=r"at least 5,\d+ bytes.* size_budget=5\d+ or more") as raised:
        gq.insert(samples / "digits_cnn.onnx", rules="weight_only", size_budget="10%")
    least = str(raised.value).split("size_budget=")[1].split()[0]
    assert gq.insert(samples / "digits_cnn.onnx", rules="weight_only", size_budget=least).search.size == int(least)
    with pytest.raises(UsageError, match=r"fake-quant .*float weights"):
        gq.insert(samples / "digits_cnn.pb", rules="weight_only", size_budget="50%")
    for budget in ("much", "nan", "%", "-2MB"):
        with pytest.raises(UsageError, match=f"'{budget}' "):
            gq.insert(samples / "digits_cnn.onnx", rules="weight_only", size_budget=budget)


def test_a_budget_and_latency_are_not_had_together(samples: Path) -> None:
    """The fastest plan may be float, which is larger than the budget: that is refused, not written."""
    options = {"data": str(samples / "digits_cnn_calib.npz"), "size_budget": "30%", "optimize": "latency"}
    with pytest.raises(UsageError, match="cannot be combined"):
        gq.insert(samples / "digits_cnn.onnx", **options)


@pytest.mark.slow
def test_the_fewest_bytes_that_meet_a_bound(samples: Path) -> None:
    """With a bound, the least size has weights of 4 bits as far as it allows, and what measures says that it is met."""
    model, options = samples / "digits_cnn.onnx", {"data": str(samples / "digits_cnn_eval.npz"), "optimize": "size"}
    sizes = {}
    for bound in (15, 22, 38):
        inserted_result = gq.insert(model, **options, min_sqnr=bound)
        sizes[bound] = model_constant_bytes(inserted_result.model)
        assert inserted_result.validation.comparison.sqnr >= bound
        trace = inserted_result.search
        assert (trace.size is None) == (bound == 38)
        if trace.size is not None:
            assert (trace.size, trace.max_size) == (sizes[bound], None)
            assert set(trace.changed_tensors.values()) == {"4-bit weights"}
            assert all(skip.rule != "search" for skip in inserted_result.skips)
    assert sizes[15] == int(gq.insert(model, size_budget=str(sizes[15]), **{**options, "optimize": "macs"}).search.size)
    with pytest.raises(UsageError, match="at least"):
        gq.insert(model, data=options["data"], size_budget=str(sizes[15] - 1))
    assert sizes[15] < sizes[22] < sizes[38]


@pytest.mark.slow
def test_a_format_that_keeps_weights_float_gets_no_smaller(samples: Path) -> None:
    """There the least size is that of the rules, and nothing is refused."""
    data = str(samples / "digits_cnn_calib.npz")
    inserted_result = gq.insert(samples / "digits_cnn.pb", data=data, samples=40, min_sqnr=20, optimize="size")
    assert (inserted_result.search.size, inserted_result.search.failures) == (None, ())


def test_folded_weights_are_examined_as_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime computes folded weights as float32 when it loads a model, so that these count with four bytes."""
    weight = onnx.numpy_helper.from_array(np.random.default_rng(0).standard_normal((64, 64), np.float32), "w")
    ends = [[onnx.helper.make_tensor_value_info(name, 1, [4, 64])] for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], "g", *ends, [weight])
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10),
        tmp_path / "m.onnx",
    )
    for rules, floats in (("weight_only_int4", 64 * 64), ("weight_only", 0)):
        result = gq.insert(tmp_path / "m.onnx", rules=rules, validate=False)
        limit = model_constant_bytes(result.model) + 4 * floats
        monkeypatch.setattr(size_budget, "MAX_EXAMINED_BYTES", limit)
        assert size_budget.can_examine(result.model)
        monkeypatch.setattr(size_budget, "MAX_EXAMINED_BYTES", limit - 1)
        assert not size_budget.can_examine(result.model)
