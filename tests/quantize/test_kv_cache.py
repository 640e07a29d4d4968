"""Caches of GroupQueryAttention as int8: types, scales, errors of decoding, and the way back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from support.decoders import Decoder, build_decoder, feeds, state_names

import graphquant as gq
from graphquant.errors import DataError, FindingsError, UsageError
from graphquant.formats import onnx as format_
from graphquant.formats.onnx import has_int8_cache
from graphquant.quantize.integer_io import CACHE_LIMIT, EXPECTED_VALUES, StateLimits, cache_limits, find_caches

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from graphquant.numerics import Array

DECODER = Decoder(architecture="llama", ops="genai", hidden=128, layers=2, heads=4, kv_heads=2)
PROMPT, STEPS = 32, 6

needs_kernel = pytest.mark.skipif(not has_int8_cache(), reason="this release of onnxruntime has no int8 caches")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A decoder as ONNX Runtime GenAI writes it."""
    onnx.save(build_decoder(DECODER), tmp_path / "decoder.onnx")
    return tmp_path / "decoder.onnx"


def samples(decoder: Decoder = DECODER) -> list[dict[str, Array]]:
    """Return prompts without past states."""
    random = np.random.default_rng(0)
    return [feeds(decoder, random.integers(0, decoder.vocabulary, (1, PROMPT))) for _ in range(16)]


def decode(path: Path, ids: Array) -> Iterator[list[Array]]:
    """Yield the outputs for a prompt and for each further token; the states go from step to step."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    cache_type = np.int8 if "int8" in session.get_inputs()[-1].type else np.float32
    shape = (1, DECODER.kv_heads, 0, DECODER.head_size)
    past = [np.zeros(shape, cache_type) for _ in state_names(DECODER, "past_key_values")]
    for start, stop in [(0, PROMPT), *((PROMPT + step, PROMPT + step + 1) for step in range(STEPS))]:
        outputs = session.run(None, feeds(DECODER, ids[:, start:stop], past))
        past = outputs[1:]
        yield outputs


@needs_kernel
@pytest.mark.parametrize("cache", ["int8", "int8-per-tensor"])
def test_decoding_with_an_int8_cache(path: Path, cache: str) -> None:
    """After six steps, the logits have 35 dB, and the states a quarter of the bytes, of the same values."""
    result = gq.insert(path, data=samples(), kv_cache=cache, exclude=["*"])
    assert [tensor.cache for tensor in result.io] == ["channel" if cache == "int8" else "tensor"] * 8
    quantized = result.save(path.with_name("q.onnx"))
    ids = np.random.default_rng(1).integers(0, DECODER.vocabulary, (1, PROMPT + STEPS))
    *_, expected = decode(path, ids)
    *_, actual = decode(quantized, ids)
    error = ((expected[0] - actual[0]) ** 2).sum()
    assert 10 * np.log10((expected[0] ** 2).sum() / error) > 35
    assert [state.dtype for state in actual[1:]] == [np.int8] * 4
    assert sum(state.nbytes for state in actual[1:]) * 4 == sum(state.nbytes for state in expected[1:])
    comparison = gq.compare(path, quantized, samples())  # float feeds and outputs, also of the loaded file
    assert min(output.sqnr or 0 for output in comparison.outputs) > 30


@needs_kernel
def test_strip_restores_the_float_cache(path: Path) -> None:
    """Without other changes the stripped model is the source; with int8 weights, its states are float again."""
    for index, rules in enumerate([{"exclude": ["*"]}, {"rules": "weight_only_int8"}]):
        result = gq.insert(path, data=samples(), kv_cache="int8", **rules)
        stripped = gq.strip(result.save(path.with_name(f"q{index}.onnx")))
        out = gq.save(stripped.model, path.with_name(f"s{index}.onnx"))
        if not index:
            assert onnx.load(out).SerializeToString(deterministic=True) == onnx.load(path).SerializeToString(
                deterministic=True
            )
        ids = np.random.default_rng(1).integers(0, DECODER.vocabulary, (1, PROMPT + STEPS))
        assert {state.dtype for outputs in decode(out, ids) for state in outputs} == {np.dtype(np.float32)}


def test_caches_that_stay_float(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is given, and nothing is written, if no cache can be int8 or nothing would run it."""
    standard, genai = (Decoder(architecture="llama", ops=ops) for ops in ("standard", "genai"))
    with pytest.raises(FindingsError, match="GroupQueryAttention"):
        gq.insert(build_decoder(standard), data=samples(standard), kv_cache="int8", rules="weight_only")
    with pytest.raises(UsageError):
        gq.insert(build_decoder(genai), kv_cache="int8", rules="weight_only")
    message = build_decoder(genai)
    message.graph.node.append(helper.make_node("Identity", ["past_key_values.0.key"], ["copy"]))
    message.graph.node.append(helper.make_node("Identity", ["present.1.value"], ["other"]))
    message.graph.output.append(helper.make_tensor_value_info("copy", TensorProto.FLOAT, None))
    message.graph.output.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, None))
    caches = find_caches(gq.load(message))
    assert ["past_key_values.0.key" in caches[0].reason, "present" in caches[1].reason] == [True, True]
    with pytest.raises(FindingsError):
        gq.insert(message, data=samples(genai), kv_cache="int8", rules="weight_only")
    monkeypatch.setattr(format_, "has_int8_cache", lambda: False, raising=False)
    with pytest.raises(FindingsError, match=r"1\.28"):
        gq.insert(build_decoder(genai), data=samples(genai), kv_cache="int8", rules="weight_only")


def test_scales_of_states() -> None:
    """Few positions raise the limit, channels of zeros get the largest scale, and empty or NaN states are errors."""
    magnitudes = np.array([[1.0, 0.0], [2.0, 0.5]], np.float32)
    many = StateLimits(magnitudes=magnitudes, positions=EXPECTED_VALUES)
    np.testing.assert_allclose(many.scale("channel") * CACHE_LIMIT, [1, 2, 2, 0.5], rtol=1e-6)
    np.testing.assert_allclose(many.scale("tensor") * CACHE_LIMIT, [2], rtol=1e-6)
    few = StateLimits(magnitudes=magnitudes, positions=10)
    np.testing.assert_allclose(few.scale("channel") / many.scale("channel"), 5**0.5, rtol=1e-6)
    caches = find_caches(gq.load(build_decoder(DECODER)))

    def results(value: Any, positions: int) -> list[dict[str, Array]]:
        return [{name: np.full((1, 2, positions, 32), value, np.float32) for name in state_names(DECODER, "present")}]

    for value, positions in ((np.nan, 2), (0, 2), (1, 0)):
        with pytest.raises(DataError):
            cache_limits(caches, results(value, positions))
    assert {limit.positions for limit in cache_limits(caches, results(1, 3) * 2).values()} == {6}
