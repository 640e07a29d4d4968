"""Data of decoders that is made from token ids by running the model."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from support.decoders import Decoder, build_decoder, feeds, state_names
from support.onnx_models import onnx_model, run_onnx
from support.shared_models import SHARED_MODELS, needs_shared_models

import graphquant as gq
from graphquant.analysis.measured_outputs import compared_outputs
from graphquant.calibration.data import MemoryData, open_data
from graphquant.calibration.data.decoder import MIN_TOKENS, STEPS, complete_decoder_data
from graphquant.calibration.holdout import open_optional_labels
from graphquant.errors import DataError, GraphQuantError
from graphquant.formats import format_module
from graphquant.ir import find_states, fixed_cache_size
from graphquant.quantize.integer_io import find_caches

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = 9
IDS = np.random.default_rng(2).integers(0, 256, (8, TOKENS))


def load_decoder(folder: Path, **fields: Any) -> tuple[Decoder, gq.Model]:
    """Write and load a decoder."""
    decoder = Decoder(**fields)
    onnx.save(build_decoder(decoder), folder / "decoder.onnx")
    return decoder, gq.load(folder / "decoder.onnx")


def open_ids(model: gq.Model, data: Any, **options: Any) -> Any:
    """Open data that was completed for a model, and return it with the labels."""
    inputs = format_module("onnx").input_specs(model)
    spec = complete_decoder_data(model, data if isinstance(data, str) else MemoryData(data))
    dataset = open_data(spec, inputs, **options)
    return open_optional_labels(dataset, spec, inputs, options.get("samples"))


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("form", ["standard", "genai"])
def test_states_are_found(form: str, architecture: str, tmp_path: Path) -> None:
    """Each past state leads to the present state of the same layer, also behind attention ops."""
    decoder, model = load_decoder(tmp_path, ops=form, architecture=architecture)
    outputs = format_module("onnx").create_runner(model).output_tensors
    names = zip(*(state_names(decoder, prefix) for prefix in ("past_key_values", "present")), strict=True)
    assert find_states(model) == {past: outputs[present] for past, present in names}
    assert find_states(load_decoder(tmp_path, past=False)[1]) == {}


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_samples_are_a_prompt_and_its_steps(architecture: str, tmp_path: Path) -> None:
    """The first tokens have empty past states, and each later one the present states of the sample before."""
    decoder, model = load_decoder(tmp_path, architecture=architecture)
    dataset, labels = open_ids(model, {"input_ids": IDS})
    samples = list(dataset)
    first = TOKENS - 1 - STEPS
    assert (len(samples), labels) == (len(IDS) * (1 + STEPS), "labels")
    past: list[np.ndarray] = []
    for index, sample in enumerate(samples[: 1 + STEPS]):
        start, stop = (0, first) if index == 0 else (first + index - 1, first + index)
        expected = feeds(decoder, IDS[:1, start:stop], past or None)
        assert sample.keys() == {*expected, "labels"}
        for name, value in expected.items():
            np.testing.assert_array_equal(sample[name], value, err_msg=name)
            assert sample[name].dtype == value.dtype
        np.testing.assert_array_equal(sample["labels"], IDS[0, start + 1 : stop + 1])
        past = run_onnx(tmp_path / "decoder.onnx", expected)[1:]


@pytest.mark.parametrize("form", ["file", "array", "list"])
def test_forms_of_ids(form: str, tmp_path: Path) -> None:
    """An npz or npy file, an array, and a list of arrays of different lengths are sequences of ids."""
    _, model = load_decoder(tmp_path)
    np.save(tmp_path / "ids.npy", IDS)
    data = {"file": str(tmp_path / "ids.npy"), "array": IDS, "list": [IDS[:1], {"input_ids": IDS[1:2, :7]}]}[form]
    dataset, _ = open_ids(model, data)
    assert dataset.count == (2 if form == "list" else len(IDS)) * (1 + STEPS)


@needs_shared_models
def test_states_of_keys_and_values() -> None:
    """A state may be keys and values in one tensor, and ids may be read by another op than Gather."""
    model = gq.load(SHARED_MODELS / "odd" / "tiny_gpt2_past.onnx")
    dataset, _ = open_ids(model, {"input_ids": IDS.astype(np.int32)})
    prompt, step = list(dataset)[:2]
    assert (prompt["past_0"].shape, step["past_0"].shape) == ((2, 1, 4, 0, 8), (2, 1, 4, TOKENS - 1 - STEPS, 8))
    assert np.abs(step["past_4"]).max() > 0


def with_unknown_sizes(message: onnx.ModelProto) -> onnx.ModelProto:
    """Make all sizes of states but the number of heads unknown, as in models of ONNX Runtime GenAI."""
    for value in [*message.graph.input, *message.graph.output]:
        sizes = value.type.tensor_type.shape.dim
        for axis in range(2, len(sizes)) if len(sizes) == 4 else ():
            sizes[axis].dim_param = f"size_{axis}"
    return message


def with_packed_inputs(message: onnx.ModelProto) -> onnx.ModelProto:
    """Join the queries, keys and values of attention ops to one tensor."""
    nodes = []
    for node in message.graph.node:
        if node.op_type == "GroupQueryAttention":
            nodes.append(onnx.helper.make_node("Concat", node.input[:3], [f"{node.name}/qkv"], axis=-1))
            node.input[:3] = [f"{node.name}/qkv", "", ""]
        nodes.append(node)
    del message.graph.node[:]
    message.graph.node.extend(nodes)
    return message


@pytest.mark.parametrize("form", ["gpt2", "llama", "packed"])
def test_states_whose_heads_have_an_unknown_size(form: str, tmp_path: Path) -> None:
    """The size of a head follows from the keys that an attention op reads, which may be one tensor with its queries."""
    decoder, model = load_decoder(tmp_path, architecture="gpt2" if form == "gpt2" else "llama")
    known, _ = open_ids(model, {"input_ids": IDS})
    message = with_unknown_sizes(build_decoder(decoder))
    onnx.save(with_packed_inputs(message) if form == "packed" else message, tmp_path / "decoder.onnx")
    unknown, _ = open_ids(gq.load(tmp_path / "decoder.onnx"), {"input_ids": IDS})
    for expected, actual in zip(known, unknown, strict=True):
        assert {name: value.shape for name, value in actual.items()} == {
            name: value.shape for name, value in expected.items()
        }


def test_states_of_a_fixed_size(tmp_path: Path) -> None:
    """A cache of the last positions, and the state of a convolution, begin with zeros; the former is not compared."""
    decoder, _ = load_decoder(tmp_path)
    message = build_decoder(decoder)
    for node in [node for node in message.graph.node if node.op_type == "GroupQueryAttention"]:
        node.attribute.extend(
            onnx.helper.make_attribute(name, value)
            for name, value in {"sliding_window_cache": 1, "local_window_size": 8}.items()
        )
    convolved = message.graph.node[-1].input[0]
    message.graph.node[-1].input[0] = "convolved"
    inputs = [convolved, "taps", "", "past_conv"]
    convolution = onnx.helper.make_node(
        "CausalConvWithState", inputs, ["convolved", "present_conv"], domain="com.microsoft"
    )
    message.graph.node.insert(len(message.graph.node) - 1, convolution)
    message.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((decoder.hidden, 1, 3), np.float32), "taps"))
    for values, name in ((message.graph.input, "past_conv"), (message.graph.output, "present_conv")):
        values.append(onnx.helper.make_tensor_value_info(name, 1, ["batch_size", decoder.hidden, 2]))
    onnx.save(message, tmp_path / "decoder.onnx")
    model = gq.load(tmp_path / "decoder.onnx")
    runner = format_module("onnx").create_runner(model)
    assert find_states(model)["past_conv"] == runner.output_tensors["present_conv"]
    spec = complete_decoder_data(model, MemoryData({"input_ids": IDS}))
    sample = next(iter(spec))
    states = [sample[name] for name in state_names(decoder, "past_key_values")]
    assert {state.shape for state in states} == {(1, decoder.kv_heads, 8, decoder.head_size)}
    assert sample["past_conv"].shape == (1, decoder.hidden, 2)
    assert not any(value.any() for value in [*states, sample["past_conv"]])
    outputs = {name: name for name in runner.outputs}
    assert compared_outputs(runner, runner, outputs).keys() == {"logits", "present_conv"}
    assert all("last positions" in cache.reason for cache in find_caches(model))


@pytest.mark.parametrize(
    "attributes",
    [
        {"num_heads": 0, "kv_num_heads": 0},
        {"kv_num_heads": -1},
        {"sliding_window_cache": 1, "local_window_size": -1},
    ],
)
def test_damaged_attention(attributes: dict[str, int], tmp_path: Path) -> None:
    """Counts of heads below one, and windows below zero, are errors of the model."""
    decoder, _ = load_decoder(tmp_path)
    message = with_unknown_sizes(build_decoder(decoder))
    for node in [node for node in message.graph.node if node.op_type == "GroupQueryAttention"]:
        kept = [attribute for attribute in node.attribute if attribute.name not in attributes]
        del node.attribute[:]
        node.attribute.extend([*kept, *itertools.starmap(onnx.helper.make_attribute, attributes.items())])
    onnx.save(message, tmp_path / "damaged.onnx")
    model = gq.load(tmp_path / "damaged.onnx")
    assert {fixed_cache_size(op) for op in model.main.ops()} == {0}
    with suppress(GraphQuantError):
        open_ids(model, {"input_ids": IDS})


def test_state_of_linear_attention(tmp_path: Path) -> None:
    """The state of the recurrence leads to the next one."""
    message = onnx_model(
        """net (float[N, T, 8] x, float[N, 2, 4, 4] past) => (float[N, T, 8] y, float[N, 2, 4, 4] present)
        { y, present = com.microsoft.LinearAttention<q_num_heads = 2, kv_num_heads = 2>(x, x, x, past, x, x) }""",
        infer_shapes=False,
    )
    message.opset_import.add(domain="com.microsoft", version=1)
    onnx.save(message, tmp_path / "m.onnx")
    states = find_states(gq.load(tmp_path / "m.onnx"))
    assert {name: tensor.port for name, tensor in states.items()} == {"past": 1}


def test_padding_is_no_text(tmp_path: Path) -> None:
    """Tokens where a given mask is 0 are left out."""
    _, model = load_decoder(tmp_path)
    mask = np.ones_like(IDS)
    mask[:, :2] = 0
    padded, _ = open_ids(model, {"input_ids": IDS, "attention_mask": mask})
    plain, _ = open_ids(model, {"input_ids": IDS[:, 2:]})
    assert padded.final_digest() == plain.final_digest()


def test_complete_data_is_not_changed(tmp_path: Path) -> None:
    """Data with past states, and data of a model without past states, stay as they are."""
    decoder, model = load_decoder(tmp_path)
    complete = MemoryData(feeds(decoder, IDS[:1]))
    assert complete_decoder_data(model, complete) is complete
    _, stateless = load_decoder(tmp_path, past=False)
    ids = MemoryData({"input_ids": IDS})
    assert complete_decoder_data(stateless, ids) is ids


def test_short_sequences(tmp_path: Path) -> None:
    """A sequence without a token for each step is an error with its index and shape."""
    _, model = load_decoder(tmp_path)
    with pytest.raises(DataError, match=rf"Sequence 0 of 'input_ids' is \[1, 4\].*{MIN_TOKENS} tokens"):
        open_ids(model, {"input_ids": IDS[:, :4]})


def test_unknown_inputs(tmp_path: Path) -> None:
    """An input that is neither in the data nor follows from the ids is named."""
    text = """
    net (int64[N, S] ids, float[N, 2] style, float[N, P, 4] past) => (float[N, T, 4] present)
    { x = Gather(table, ids) present = Concat<axis = 1>(past, x) }
    """
    onnx.save(onnx_model(text, {"table": np.ones((64, 4), np.float32)}), tmp_path / "m.onnx")
    with pytest.raises(DataError, match="'style' is none of them"):
        complete_decoder_data(gq.load(tmp_path / "m.onnx"), MemoryData({"ids": IDS}))


def test_positions_are_no_content(tmp_path: Path) -> None:
    """Positions that are the same in all samples, and the lengths of inputs, cause no warning about the data."""
    decoder, _ = load_decoder(tmp_path, architecture="gpt2", past=False)
    ids = np.random.default_rng(1).integers(0, 256, (40, 12))
    kinds = {finding.kind for finding in gq.check_data(tmp_path / "decoder.onnx", feeds(decoder, ids)).findings}
    assert kinds == {"stacked"}
    load_decoder(tmp_path, ops="standard", positions=64)
    assert gq.check_data(tmp_path / "decoder.onnx", {"input_ids": ids}).findings == ()
