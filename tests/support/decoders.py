"""Build decoders with seeded weights: GPT-2-like and Llama-like, in standard ops and as ONNX Runtime GenAI writes them.

All have the inputs `input_ids` (batch, sequence) and `attention_mask` (batch, total), and the output `logits` (batch,
sequence, vocabulary). GPT-2-like ones also have `position_ids`. With past states, they have the inputs
`past_key_values.N.key` and `.value` and the outputs `present.N.key` and `.value`, (batch, heads, positions, size).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Sequence

MICROSOFT = "com.microsoft"
EPSILON = 1e-5
MASKED_SCORE = -1e4
ROTARY_BASE = 10000.0


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Form and sizes of a decoder. Equal sizes and seeds give equal weights in all forms of an architecture."""

    architecture: Literal["gpt2", "llama"] = "llama"
    ops: Literal["standard", "opset23", "genai"] = "genai"
    past: bool = True  # with past and present states
    tied: Literal["transposed", "shared"] | None = (
        "shared"  # an own transposed initializer, Transpose, or other weights
    )
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2  # of Llama-like decoders
    vocabulary: int = 256
    positions: int = 128
    seed: int = 0

    @property
    def key_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.kv_heads if self.architecture == "llama" else self.heads

    @property
    def head_size(self) -> int:
        """Values of a head."""
        return self.hidden // self.heads

    @property
    def inner(self) -> int:
        """Width of the hidden layer of the feed-forward part."""
        return 4 * self.hidden


@dataclass
class _Net:
    decoder: Decoder
    nodes: list[Any] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)

    def op(
        self, type_: str, *inputs: str, name: str, outputs: Sequence[str] = (), domain: str = "", **attrs: Any
    ) -> str:
        """Add an op; return its first output."""
        names = list(outputs) or [f"{name}/output_0"]
        self.nodes.append(helper.make_node(type_, list(inputs), names, name=name, domain=domain, **attrs))
        return names[0]

    def constant(self, name: str, value: Any, dtype: Any = np.float32) -> str:
        """Add an initializer; return its name."""
        if name not in self.weights:
            self.weights[name] = numpy_helper.from_array(np.array(value, dtype, order="C"), name)
        return name

    def normal(self, name: str, *shape: int, deviation: float) -> str:
        """Add normal weights that depend on the seed and the name only."""
        rng = np.random.default_rng([self.decoder.seed, *name.encode()])
        return self.constant(name, rng.normal(0, deviation, shape))

    def gains(self, name: str) -> str:
        """Add the gains of a normalization."""
        rng = np.random.default_rng([self.decoder.seed, *name.encode()])
        return self.constant(name, rng.lognormal(0, 0.2, self.decoder.hidden))

    def indices(self, *values: int) -> str:
        """Add int64 values."""
        return self.constant("indices_" + "_".join(map(str, values)), values, np.int64)

    def linear(self, x: str, name: str, before: int, after: int) -> str:
        """Add a product, with a bias in GPT-2-like decoders."""
        weight = self.normal(f"{name}.MatMul.weight", before, after, deviation=before**-0.5)
        product = self.op("MatMul", x, weight, name=f"{name}/MatMul")
        if self.decoder.architecture == "llama":
            return product
        bias = self.normal(f"{name}.Add.bias", after, deviation=0.1)
        return self.op("Add", product, bias, name=f"{name}/Add")


def build_decoder(decoder: Decoder) -> onnx.ModelProto:
    """Return the model."""
    net = _Net(decoder)
    table = net.normal("model.embed_tokens.weight", decoder.vocabulary, decoder.hidden, deviation=1.0)
    x = net.op("Gather", table, "input_ids", name="/model/embed_tokens/Gather")
    if decoder.architecture == "gpt2":
        places = net.normal("model.embed_positions.weight", decoder.positions, decoder.hidden, deviation=0.3)
        place = net.op("Gather", places, "position_ids", name="/model/embed_positions/Gather")
        x = net.op("Add", x, place, name="/model/embed/Add")
    shared = _shared_inputs(net)
    # `pending` is the output of the part before, which a skip normalization adds to `x`.
    pending = ""
    for layer in range(decoder.layers):
        prefix = f"/model/layers.{layer}"
        x, y = _normalize(net, x, pending, f"{prefix}/input_layernorm")
        pending = _attention(net, y, layer, shared)
        x, y = _normalize(net, x, pending, f"{prefix}/post_attention_layernorm")
        pending = _feed_forward(net, y, prefix)
    _, y = _normalize(net, x, pending, "/model/final_norm")
    if decoder.tied == "shared":
        head = net.op("Transpose", table, name="/lm_head/Transpose", perm=[1, 0])
    elif decoder.tied == "transposed":
        head = net.constant("lm_head.MatMul.weight", numpy_helper.to_array(net.weights[table]).T)
    else:
        head = net.normal("lm_head.MatMul.weight", decoder.hidden, decoder.vocabulary, deviation=1.0)
    # Scaled so that the logits of a tied table do not decide every token alone
    scale = net.constant("lm_head.scale", decoder.hidden**-0.5)
    y = net.op("Mul", y, scale, name="/lm_head/Mul")
    net.op("MatMul", y, head, name="/lm_head/MatMul", outputs=["logits"])
    return _model(net)


def feeds(decoder: Decoder, ids: Any, past: Sequence[Any] | None = None) -> dict[str, Any]:
    """Return all inputs for token ids (batch, sequence), after past states in the order of the inputs, if any."""
    batch, sequence = np.shape(ids)
    past_length = past[0].shape[2] if past is not None and len(past) else 0
    inputs = {
        "input_ids": np.asarray(ids, np.int64),
        "attention_mask": np.ones((batch, past_length + sequence), np.int64),
    }
    if decoder.architecture == "gpt2":
        inputs["position_ids"] = np.tile(np.arange(past_length, past_length + sequence), (batch, 1))
    if decoder.past:
        empty = np.zeros((batch, decoder.key_heads, 0, decoder.head_size), np.float32)
        names = state_names(decoder, "past_key_values")
        inputs |= dict(zip(names, past or [empty] * len(names), strict=True))
    return inputs


def state_names(decoder: Decoder, prefix: str) -> list[str]:
    """Return the names of the past or present states, in the order of the model."""
    return [f"{prefix}.{layer}.{part}" for layer in range(decoder.layers) for part in ("key", "value")]


def _model(net: _Net) -> onnx.ModelProto:
    decoder = net.decoder
    ids = ["batch_size", "sequence_length"]
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ids),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]),
    ]
    if decoder.architecture == "gpt2":
        inputs.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, ids))
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [*ids, decoder.vocabulary])]
    for values, prefix, length in (
        (inputs, "past_key_values", "past_sequence_length"),
        (outputs, "present", "total_sequence_length"),
    ):
        shape = ["batch_size", decoder.key_heads, length, decoder.head_size]
        for name in state_names(decoder, prefix) if decoder.past else ():
            values.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    graph = helper.make_graph(net.nodes, "decoder", inputs, outputs, list(net.weights.values()))
    opset = 23 if decoder.ops == "opset23" else 18
    versions = [helper.make_opsetid("", opset)] + (
        [helper.make_opsetid(MICROSOFT, 1)] if decoder.ops == "genai" else []
    )
    model = helper.make_model(graph, opset_imports=versions, ir_version=11 if opset == 23 else 9)
    if decoder.ops != "genai":
        onnx.checker.check_model(model, full_check=True)
    return model


def _normalize(net: _Net, x: str, pending: str, name: str) -> tuple[str, str]:
    """Add `pending` to `x`, if any, and normalize; return the sum and the normalized sum."""
    decoder = net.decoder
    gain = net.gains(f"{name}.weight")
    is_llama = decoder.architecture == "llama"
    extra = [] if is_llama else [net.normal(f"{name}.bias", decoder.hidden, deviation=0.1)]
    if decoder.ops == "genai":
        kind = "SimplifiedLayerNormalization" if is_llama else "LayerNormalization"
        if not pending:
            return x, net.op(kind, x, gain, *extra, name=name, epsilon=EPSILON, axis=-1)
        outputs = [f"{name}/output_0", "", "", f"{name}/output_3"]
        normalized = net.op(
            f"Skip{kind}", x, pending, gain, *extra, name=name, outputs=outputs, domain=MICROSOFT, epsilon=EPSILON
        )
        return outputs[3], normalized
    if pending:
        x = net.op("Add", x, pending, name=f"{name}/Add")
    if not is_llama:
        return x, net.op("LayerNormalization", x, gain, *extra, name=name, epsilon=EPSILON)
    if decoder.ops == "opset23":
        return x, net.op("RMSNormalization", x, gain, name=name, epsilon=EPSILON)
    square = net.op("Pow", x, net.constant("two", 2.0), name=f"{name}/Pow")
    mean = net.op("ReduceMean", square, net.indices(-1), name=f"{name}/ReduceMean", keepdims=1)
    shifted = net.op("Add", mean, net.constant("epsilon", EPSILON), name=f"{name}/Epsilon")
    inverse = net.op("Reciprocal", net.op("Sqrt", shifted, name=f"{name}/Sqrt"), name=f"{name}/Reciprocal")
    return x, net.op("Mul", gain, net.op("Mul", x, inverse, name=f"{name}/Mul"), name=f"{name}/Scale")


def _feed_forward(net: _Net, x: str, prefix: str) -> str:
    decoder = net.decoder
    mlp, width, inner = f"{prefix}/mlp", decoder.hidden, decoder.inner
    if decoder.architecture == "llama":
        gate, up = (net.linear(x, f"{mlp}/{part}_proj", width, inner) for part in ("gate", "up"))
        silu = net.op("Mul", gate, net.op("Sigmoid", gate, name=f"{mlp}/act_fn/Sigmoid"), name=f"{mlp}/act_fn/Mul")
        return net.linear(net.op("Mul", silu, up, name=f"{mlp}/Mul"), f"{mlp}/down_proj", inner, width)
    hidden = net.linear(x, f"{mlp}/fc_in", width, inner)
    if decoder.ops == "genai":
        activated = net.op("FastGelu", hidden, name=f"{mlp}/act_fn/FastGelu", domain=MICROSOFT)
    elif decoder.ops == "opset23":
        activated = net.op("Gelu", hidden, name=f"{mlp}/act_fn/Gelu", approximate="tanh")
    else:
        cube = net.op("Pow", hidden, net.constant("three", 3.0), name=f"{mlp}/act_fn/Pow")
        scaled = net.op("Mul", cube, net.constant("gelu_cubic", 0.044715), name=f"{mlp}/act_fn/Cubic")
        total = net.op("Add", hidden, scaled, name=f"{mlp}/act_fn/Add")
        argument = net.op("Mul", total, net.constant("gelu_root", (2 / np.pi) ** 0.5), name=f"{mlp}/act_fn/Root")
        plus = net.op(
            "Add",
            net.op("Tanh", argument, name=f"{mlp}/act_fn/Tanh"),
            net.constant("one", 1.0),
            name=f"{mlp}/act_fn/One",
        )
        half = net.op("Mul", hidden, net.constant("half", 0.5), name=f"{mlp}/act_fn/Half")
        activated = net.op("Mul", half, plus, name=f"{mlp}/act_fn/Mul")
    return net.linear(activated, f"{mlp}/fc_out", inner, width)


def _shared_inputs(net: _Net) -> dict[str, str]:
    """Add the ops that all layers read: lengths, masks and rotations."""
    decoder = net.decoder
    shared: dict[str, str] = {}
    if decoder.architecture == "llama":
        half = decoder.head_size // 2
        angles = np.outer(np.arange(decoder.positions), ROTARY_BASE ** (-np.arange(half) / half))
        shared = {name: net.constant(f"{name}_cache", getattr(np, name)(angles)) for name in ("cos", "sin")}
    mask = "/model/attn_mask_reformat"
    total = net.op(
        "Gather",
        net.op("Shape", "attention_mask", name=f"{mask}/Shape"),
        net.constant("index_1", 1, np.int64),
        name=f"{mask}/Gather",
    )
    if decoder.ops == "genai" and decoder.architecture == "llama":
        counts = net.op("ReduceSum", "attention_mask", net.indices(1), name=f"{mask}/ReduceSum", keepdims=0)
        last = net.op("Sub", counts, net.indices(1), name=f"{mask}/Sub")
        shared["seqlens_k"] = net.op("Cast", last, name=f"{mask}/Lengths/Cast", to=TensorProto.INT32)
        shared["total"] = net.op("Cast", total, name=f"{mask}/Total/Cast", to=TensorProto.INT32)
        return shared
    index = net.constant("index_1", 1, np.int64)
    length = net.op("Gather", net.op("Shape", "input_ids", name=f"{mask}/Ids"), index, name=f"{mask}/Length")
    past = net.op("Sub", total, length, name=f"{mask}/Past")
    zero, one = net.constant("zero", 0, np.int64), net.constant("step", 1, np.int64)
    columns = net.op("Range", zero, total, one, name=f"{mask}/Columns")
    rows = net.op("Range", past, total, one, name=f"{mask}/Rows")
    row_axis = net.op("Unsqueeze", rows, net.indices(1), name=f"{mask}/Unsqueeze")
    earlier = net.op("LessOrEqual", columns, row_axis, name=f"{mask}/LessOrEqual")
    present = net.op("Cast", "attention_mask", name=f"{mask}/Cast", to=TensorProto.BOOL)
    present = net.op("Unsqueeze", present, net.indices(1, 2), name=f"{mask}/Present")
    allowed = net.op("And", earlier, present, name=f"{mask}/And")
    no_score, masked = net.constant("no_score", 0.0), net.constant("masked_score", MASKED_SCORE)
    shared["mask"] = net.op("Where", allowed, no_score, masked, name=f"{mask}/Where")
    if decoder.architecture == "llama":
        for name in ("cos", "sin"):
            rotation = net.op("Gather", shared[name], rows, name=f"/model/rotary/{name}", axis=0)
            shared[name] = net.op("Unsqueeze", rotation, net.indices(0), name=f"/model/rotary/{name}_batch")
    return shared


def _attention(net: _Net, x: str, layer: int, shared: dict[str, str]) -> str:
    decoder = net.decoder
    prefix = f"/model/layers.{layer}/attn"
    keys = decoder.key_heads * decoder.head_size
    widths = {"q": decoder.hidden, "k": keys, "v": keys}
    q, k, v = (net.linear(x, f"{prefix}/{part}_proj", decoder.hidden, width) for part, width in widths.items())
    past = [f"past_key_values.{layer}.{part}" for part in ("key", "value")] if decoder.past else ["", ""]
    present = [f"present.{layer}.{part}" for part in ("key", "value")] if decoder.past else []
    write = {"genai": _genai_attention, "opset23": _opset23_attention, "standard": _standard_attention}[decoder.ops]
    mixed = write(net, prefix, [q, k, v], past, present, shared)
    return net.linear(mixed, f"{prefix}/o_proj", decoder.hidden, decoder.hidden)


def _genai_attention(
    net: _Net, prefix: str, qkv: list[str], past: list[str], present: list[str], shared: dict[str, str]
) -> str:
    decoder = net.decoder
    if decoder.architecture == "gpt2":
        name = f"{prefix}/MultiHeadAttention"
        inputs = [*qkv, "", "", shared["mask"], *past]
        outputs = [f"{name}/output_0", *present]
        heads = decoder.heads
        return net.op("MultiHeadAttention", *inputs, name=name, outputs=outputs, domain=MICROSOFT, num_heads=heads)
    name = f"{prefix}/GroupQueryAttention"
    inputs = [*qkv, *past, shared["seqlens_k"], shared["total"], shared["cos"], shared["sin"]]
    # The op always has present states; without past ones nothing reads them.
    outputs = [f"{name}/output_0", *(present or [f"{name}/output_1", f"{name}/output_2"])]
    heads = {"num_heads": decoder.heads, "kv_num_heads": decoder.kv_heads, "do_rotary": 1}
    return net.op("GroupQueryAttention", *inputs, name=name, outputs=outputs, domain=MICROSOFT, **heads)


def _heads(net: _Net, x: str, prefix: str, heads: int) -> str:
    shape = net.indices(0, 0, heads, net.decoder.head_size)
    return net.op(
        "Transpose",
        net.op("Reshape", x, shape, name=f"{prefix}/Reshape"),
        name=f"{prefix}/Transpose",
        perm=[0, 2, 1, 3],
    )


def _opset23_attention(
    net: _Net, prefix: str, qkv: list[str], past: list[str], present: list[str], shared: dict[str, str]
) -> str:
    decoder = net.decoder
    head_counts = [decoder.heads, decoder.key_heads, decoder.key_heads]
    parts = [
        _heads(net, part, f"{prefix}/{letter}", heads)
        for part, letter, heads in zip(qkv, "qkv", head_counts, strict=True)
    ]
    if decoder.architecture == "llama":
        size = net.op("Shape", parts[0], name=f"{prefix}/Batch", start=0, end=1)
        tables = []
        for name in ("cos", "sin"):
            shape = net.op("Concat", size, net.indices(1, 1), name=f"{prefix}/{name}_shape", axis=0)
            tables.append(net.op("Expand", shared[name], shape, name=f"{prefix}/{name}"))
        for index in (0, 1):
            name = f"{prefix}/{'qk'[index]}_rotary/RotaryEmbedding"
            parts[index] = net.op("RotaryEmbedding", parts[index], *tables, name=name)
    outputs = [f"{prefix}/Attention/output_0", *present]
    mixed = net.op("Attention", *parts, shared["mask"], *past, name=f"{prefix}/Attention", outputs=outputs)
    return _join_heads(net, mixed, prefix)


def _join_heads(net: _Net, x: str, prefix: str) -> str:
    turned = net.op("Transpose", x, name=f"{prefix}/Join/Transpose", perm=[0, 2, 1, 3])
    return net.op("Reshape", turned, net.indices(0, 0, net.decoder.hidden), name=f"{prefix}/Join/Reshape")


def _standard_attention(
    net: _Net, prefix: str, qkv: list[str], past: list[str], present: list[str], shared: dict[str, str]
) -> str:
    decoder = net.decoder
    groups = decoder.heads // decoder.key_heads
    q, k, v = (
        _heads(net, part, f"{prefix}/{letter}", heads)
        for part, letter, heads in zip(qkv, "qkv", [decoder.heads, *[decoder.key_heads] * 2], strict=True)
    )
    if decoder.architecture == "llama":
        q, k = (_rotate(net, part, f"{prefix}/{letter}_rotary", shared) for part, letter in ((q, "q"), (k, "k")))
    if decoder.past:
        k, v = (
            net.op("Concat", state, part, name=f"{prefix}/{letter}_cache", outputs=[output], axis=2)
            for state, part, output, letter in zip(past, (k, v), present, "kv", strict=True)
        )
    if groups > 1:
        k, v = (_repeat_heads(net, part, f"{prefix}/{letter}_repeat", groups) for part, letter in ((k, "k"), (v, "v")))
    turned = net.op("Transpose", k, name=f"{prefix}/Keys", perm=[0, 1, 3, 2])
    scores = net.op("MatMul", q, turned, name=f"{prefix}/Scores")
    scale = net.constant("score_scale", decoder.head_size**-0.5)
    scaled = net.op("Mul", scores, scale, name=f"{prefix}/Mul")
    masked = net.op("Add", scaled, shared["mask"], name=f"{prefix}/Mask")
    mixed = net.op("MatMul", net.op("Softmax", masked, name=f"{prefix}/Softmax", axis=-1), v, name=f"{prefix}/Mixed")
    return _join_heads(net, mixed, prefix)


def _rotate(net: _Net, x: str, name: str, shared: dict[str, str]) -> str:
    """Rotate (batch, heads, sequence, size): [a cos - b sin, b cos + a sin] for the halves a and b."""
    half = net.decoder.head_size // 2
    axis = net.indices(3)
    a, b = (
        net.op("Slice", x, net.indices(start), net.indices(end), axis, name=f"{name}/{part}")
        for part, start, end in (("Low", 0, half), ("High", half, 2 * half))
    )

    def product(x: str, table: str, part: str) -> str:
        return net.op("Mul", x, shared[table], name=f"{name}/{part}")

    low = net.op("Sub", product(a, "cos", "LowCos"), product(b, "sin", "HighSin"), name=f"{name}/Sub")
    high = net.op("Add", product(b, "cos", "HighCos"), product(a, "sin", "LowSin"), name=f"{name}/Add")
    return net.op("Concat", low, high, name=f"{name}/Concat", axis=-1)


def _repeat_heads(net: _Net, x: str, name: str, groups: int) -> str:
    """Repeat each head of (batch, heads, total, size) `groups` times."""
    decoder = net.decoder
    wide = net.op("Unsqueeze", x, net.indices(2), name=f"{name}/Unsqueeze")
    repeated = net.op("Expand", wide, net.indices(1, 1, groups, 1, 1), name=f"{name}/Expand")
    batch = net.op("Shape", x, name=f"{name}/Batch", start=0, end=1)
    shape = net.op("Concat", batch, net.indices(decoder.heads, -1, decoder.head_size), name=f"{name}/Shape", axis=0)
    return net.op("Reshape", repeated, shape, name=f"{name}/Reshape")
