"""Decoders in standard ops and as ONNX Runtime GenAI writes them: multiply-adds, opset upgrades and coverage."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime
import pytest
from support.decoders import Decoder, build_decoder, feeds, state_names
from support.onnx_models import run_onnx
from support.plans import disable_costs
from support.shared_models import SHARED_MODELS, needs_shared_models

import graphquant as gq
from graphquant.analysis.model_summary import summarize_model
from graphquant.formats import format_module
from graphquant.formats.onnx.conversions import upgrade_opset
from graphquant.formats.onnx.runtime import supports_fused_form
from graphquant.ir import count_macs, find_states, unsized_tensors
from graphquant.qdq import FusedForm
from graphquant.qdq.family import FamilyArguments

if TYPE_CHECKING:
    from pathlib import Path

HAS_OPSET_23 = tuple(map(int, onnxruntime.__version__.split(".")[:2])) > (1, 22)
FORMS = ["standard", *(["opset23"] if HAS_OPSET_23 else []), "genai"]
PAST_LENGTH, LENGTH = 4, 12


def decoder_feeds(decoder: Decoder, samples: int) -> dict[str, np.ndarray]:
    """Return seeded ids, with past states of 4 positions if the decoder has them."""
    rng = np.random.default_rng(5)
    ids = rng.integers(0, decoder.vocabulary, (samples, LENGTH))
    shape = (samples, decoder.key_heads, PAST_LENGTH, decoder.head_size)
    past = [rng.normal(0, 1, shape).astype(np.float32) for _ in state_names(decoder, "")] if decoder.past else None
    return feeds(decoder, ids, past)


def save_decoder(decoder: Decoder, folder: Path) -> Path:
    """Write the model of a decoder."""
    onnx.save(build_decoder(decoder), folder / "decoder.onnx")
    return folder / "decoder.onnx"


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("form", FORMS)
def test_attention_is_counted(form: str, architecture: str, past: bool, tmp_path: Path) -> None:
    """Each form of attention has the multiply-adds of the scores and of the mean of the values, of all positions."""
    decoder = Decoder(architecture=architecture, ops=form, past=past)
    model = gq.load(save_decoder(decoder, tmp_path))
    tensors = unsized_tensors(model)
    sizes = format_module("onnx").create_runner(model).element_counts(tensors, decoder_feeds(decoder, 1))
    keys = LENGTH + PAST_LENGTH * past
    attention = 2 * LENGTH * keys * decoder.hidden
    width, inner, kv_width = decoder.hidden, decoder.inner, decoder.key_heads * decoder.head_size
    layer = 2 * width * width + 2 * width * kv_width + (3 if architecture == "llama" else 2) * width * inner
    expected = decoder.layers * (LENGTH * layer + attention) + LENGTH * width * decoder.vocabulary
    assert sum(count_macs(model, sizes).values()) == expected


@needs_shared_models
def test_attention_with_its_own_weight() -> None:
    """An Attention of com.microsoft also multiplies its input by the weight of queries, keys and values."""
    model = gq.load(SHARED_MODELS / "odd" / "tiny_gpt2_past.onnx")
    inputs = dict.fromkeys(("input_ids", "position_ids"), np.ones((1, 6), np.int32))
    inputs["attention_mask"] = np.ones((1, 8), np.int32)
    inputs |= {f"past_{layer}": np.zeros((2, 1, 4, 2, 8), np.float32) for layer in range(5)}
    sizes = format_module("onnx").create_runner(model).element_counts(unsized_tensors(model), inputs)
    assert count_macs(model, sizes)["", "GptAttention_0"] == 6 * 32 * 3 * 32 + 2 * 6 * 8 * 32


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("past", [False, True])
def test_forms_do_not_depend_on_the_ops(architecture: str, tmp_path: Path, *, past: bool) -> None:
    """The lengths of a text reach all products, also through attention ops whose types onnx does not know."""
    net = Decoder(architecture=architecture, past=past, hidden=256, vocabulary=1024, tied=None)
    forms = {}
    for ops in ("standard", "genai"):
        onnx.save(build_decoder(replace(net, ops=ops)), tmp_path / "model.onnx")
        plan = gq.plan(tmp_path / "model.onnx", rules="weight_only_int8")
        products = [site for site in plan.sites if site.uses[0].op.endswith("/MatMul")]
        forms[ops] = {site.uses[0].op: site.scheme.args.form for site in products}
    assert forms["standard"] == forms["genai"]
    assert {*forms["genai"].values()} == ({"packed"} if past else {"packed", "folded"})  # few weights are folded


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_upgrade_with_ops_that_only_onnxruntime_knows(architecture: str, tmp_path: Path) -> None:
    """An opset upgrade keeps SimplifiedLayerNormalization, which the default domain of onnx does not have."""
    decoder = Decoder(architecture=architecture)
    model = gq.load(save_decoder(decoder, tmp_path))
    upgraded = upgrade_opset(model, 21)
    kinds = {op.kind for op in upgraded.main.ops()}
    assert upgraded.opset == 21
    assert ("rmsnorm" if architecture == "llama" else "layernorm") in kinds
    gq.save(upgraded, tmp_path / "upgraded.onnx")
    inputs = decoder_feeds(decoder, 1)
    for before, after in zip(
        run_onnx(tmp_path / "decoder.onnx", inputs), run_onnx(tmp_path / "upgraded.onnx", inputs), strict=True
    ):
        np.testing.assert_allclose(before, after, atol=1e-5)


def test_coverage_of_the_default_rules(tmp_path: Path) -> None:
    """At least 95% of the multiply-adds have integer inputs, and the attention ops have the reason why they do not."""
    decoder = Decoder(hidden=128, vocabulary=512)
    result = gq.insert(save_decoder(decoder, tmp_path), data=decoder_feeds(decoder, 48))
    assert result.validation is not None
    assert result.validation.quantized_share is not None
    assert result.validation.quantized_share >= 0.95
    attention = {use.op for skip in result.plan.skips if skip.rule == "attention" for use in skip.uses}
    assert attention == {f"/model/layers.{layer}/attn/GroupQueryAttention" for layer in range(decoder.layers)}


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_past_and_present_share_a_scale(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A past state has the scale of its present state, whose range contains that of both."""
    disable_costs(monkeypatch)
    decoder = Decoder(architecture=architecture, ops="standard")
    path = save_decoder(decoder, tmp_path)
    inputs = decoder_feeds(decoder, 8)
    result = gq.insert(path, data=inputs, validate=False)
    scales = {
        entry.site.tensor: (float(entry.params.scale), int(entry.params.zero_point))
        for entry in result.inserted
        if not entry.site.parameter
    }
    states = find_states(result.source)
    assert len(states) == 2 * decoder.layers
    for past, present in states.items():
        assert scales[gq.TensorRef("", past)] == scales[present]
    past, present = next(iter(states.items()))
    louder = gq.insert(path, data={**inputs, past: 8 * inputs[past]}, validate=False)
    (params,) = [entry.params for entry in louder.inserted if entry.site.tensor == present]
    assert float(params.scale) > 4 * scales[present][0]


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("rules", ["weight_only", "weight_only_int4", "weight_only_int8", "dynamic"])
@pytest.mark.parametrize("form", FORMS)
def test_every_product_has_a_weight_or_a_reason(form: str, rules: str, architecture: str, tmp_path: Path) -> None:
    """Products of scores and values are skipped with a reason, and `inspect` has one for them and no other op."""
    decoder = Decoder(architecture=architecture, ops=form, hidden=256)  # smaller products are not dynamic
    result = gq.insert(save_decoder(decoder, tmp_path), rules=rules)
    coverage = summarize_model(gq.load(result.save(tmp_path / "quant.onnx"))).coverage
    skipped = {use.op for skip in result.plan.skips if not skip.fused for use in skip.uses}
    without_weight = {covered.op for covered in coverage if not (covered.quantized or covered.partly_quantized)}
    assert without_weight == skipped
    assert len(skipped) == (4 if form == "standard" else 2)
    is_float = {covered.op for covered in coverage if covered.reason}
    assert is_float == (skipped if rules == "dynamic" else {covered.op for covered in coverage})


@pytest.mark.parametrize("past", [False, True])
def test_forms_within_a_size_budget(tmp_path: Path, *, past: bool) -> None:
    """Weights of a chosen width have the form for 64 tokens, if the release has it, or for one token after others."""
    decoder = Decoder(past=past, hidden=256, vocabulary=1024, tied=None, ops="standard")
    result = gq.insert(save_decoder(decoder, tmp_path), rules="weight_only_int8", size_budget="20%")
    chosen = [site.scheme for site in result.plan.sites if site.rule == "size-budget"]
    folds = supports_fused_form(FusedForm(op_type="", bits=4, args=FamilyArguments(form="folded")))
    assert {(scheme.type.bits, scheme.args.form) for scheme in chosen} == {
        (4, "packed" if past or not folds else "folded")
    }
