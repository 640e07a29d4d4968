"""Bits per byte of a small language model that is trained here, in float and quantized.

Run: python benchmarks/language_model.py [--steps 300] [--folder DIR]
It needs TensorFlow, and onnxruntime from 1.28 on for the caches of int8. The decoder reads bytes, has a million
weights, and is trained for a few minutes on modules of Python's standard library. Weights, data and order are seeded,
but sums of floats differ between machines. The ONNX model has the ops of ONNX Runtime GenAI (GroupQueryAttention), and
its logits are those of TensorFlow. Bits per byte are of modules that were not used otherwise: half of each text is the
prompt, and its other half is fed byte by byte, so that each prediction reads the states of the steps before.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

import graphquant as gq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.decoders import EPSILON, Decoder, build_decoder, feeds, state_names  # noqa: E402  # needs the path above

if TYPE_CHECKING:
    from collections.abc import Callable

DECODER = Decoder(
    architecture="llama", ops="genai", tied=None, layers=4, hidden=128, heads=4, kv_heads=2, positions=256
)
TRAINING_MODULES = (
    *("argparse", "ast", "asyncio/base_events", "asyncio/streams", "bdb", "codecs", "collections/__init__"),
    *("concurrent/futures/process", "configparser", "contextlib", "copy", "csv", "dataclasses", "datetime", "difflib"),
    *("doctest", "email/message", "enum", "fractions", "ftplib", "functools", "gettext", "heapq", "http/client"),
    *("http/cookiejar", "imaplib", "importlib/_bootstrap", "inspect", "ipaddress", "json/decoder", "locale"),
    *("logging/__init__", "mailbox", "mimetypes", "nntplib", "ntpath", "optparse", "os", "pathlib", "pdb", "pickle"),
    *("pickletools", "platform", "plistlib", "pprint", "pydoc", "random", "shutil", "smtplib", "socket", "ssl"),
    *("statistics", "subprocess", "tarfile", "tempfile", "threading", "traceback", "turtle", "typing", "unittest/mock"),
    *("urllib/request", "uuid", "warnings", "weakref", "xml/dom/minidom", "zipfile"),
)
"""Modules of the standard library; those that a release does not have are left out."""

HELD_OUT_MODULES = ("calendar", "cmd", "fileinput", "getpass", "selectors", "shlex", "string", "textwrap", "timeit")
CONTEXT, BATCH, RATE, WARM_UP = 192, 16, 3e-3, 30
TEXTS, CALIBRATION_TEXTS = 64, 40
MAX_LOSS = {"int4 weights": 0.01, "int8 cache, per channel": 0.002, "int8 cache, per tensor": 0.002}
"""Largest accepted increase of the bits per byte."""


def read_modules(names: tuple[str, ...]) -> np.ndarray[Any, Any]:
    """Return the bytes of modules of the standard library."""
    paths = [Path(sysconfig.get_paths()["stdlib"], f"{name}.py") for name in names]
    return np.frombuffer(b"\n".join(path.read_bytes() for path in paths if path.is_file()), np.uint8)


def windows(text: np.ndarray[Any, Any], count: int, seed: int) -> np.ndarray[Any, Any]:
    """Return parts of a text at random positions, int64 (count, CONTEXT + 1)."""
    starts = np.random.default_rng(seed).integers(0, len(text) - CONTEXT, count)
    return np.stack([text[start : start + CONTEXT + 1] for start in starts]).astype(np.int64)


def logits_function() -> Callable[[dict[str, Any], Any], Any]:
    """Return the decoder as a function of its weights and ids, in TensorFlow."""
    import tensorflow as tf

    size, heads, groups = DECODER.head_size, DECODER.heads, DECODER.heads // DECODER.kv_heads

    def normalize(x: Any, gain: Any) -> Any:
        return x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + EPSILON) * gain

    def rotate(x: Any, weights: dict[str, Any]) -> Any:
        low, high = x[..., : size // 2], x[..., size // 2 :]
        cos, sin = (weights[f"{name}_cache"][: x.shape[2]] for name in ("cos", "sin"))
        return tf.concat([low * cos - high * sin, high * cos + low * sin], -1)

    def split(x: Any, count: int) -> Any:
        return tf.transpose(tf.reshape(x, (x.shape[0], x.shape[1], count, size)), (0, 2, 1, 3))

    def compute(weights: dict[str, Any], ids: Any) -> Any:
        x = tf.gather(weights["model.embed_tokens.weight"], ids)
        mask = tf.linalg.band_part(tf.ones((ids.shape[1],) * 2), -1, 0) * 1e9 - 1e9
        for layer in range(DECODER.layers):
            prefix = f"/model/layers.{layer}"
            y = normalize(x, weights[f"{prefix}/input_layernorm.weight"])
            q, k, v = (y @ weights[f"{prefix}/attn/{part}_proj.MatMul.weight"] for part in "qkv")
            q, k, v = split(q, heads), split(k, DECODER.kv_heads), split(v, DECODER.kv_heads)
            q, k = rotate(q, weights), rotate(k, weights)
            k, v = (tf.repeat(part, groups, 1) for part in (k, v))
            scores = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * size**-0.5 + mask)
            mixed = tf.reshape(tf.transpose(scores @ v, (0, 2, 1, 3)), x.shape)
            x += mixed @ weights[f"{prefix}/attn/o_proj.MatMul.weight"]
            y = normalize(x, weights[f"{prefix}/post_attention_layernorm.weight"])
            gate, up = (y @ weights[f"{prefix}/mlp/{part}_proj.MatMul.weight"] for part in ("gate", "up"))
            x += (tf.nn.silu(gate) * up) @ weights[f"{prefix}/mlp/down_proj.MatMul.weight"]
        y = normalize(x, weights["/model/final_norm.weight"]) * weights["lm_head.scale"]
        return y @ weights["lm_head.MatMul.weight"]

    return compute


def train(message: Any, text: np.ndarray[Any, Any], steps: int) -> None:
    """Train the decoder on a text with Adam, and store its weights in its message."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(os.cpu_count() or 1)
    compute = logits_function()
    constants = ("cos_cache", "sin_cache", "lm_head.scale")
    floats = [tensor for tensor in message.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in floats}
    variables = {name: tf.Variable(value) for name, value in values.items() if name not in constants}
    weights = {name: variables.get(name, values[name]) for name in values}
    moments = [{name: tf.Variable(tf.zeros_like(value)) for name, value in variables.items()} for _ in range(2)]

    @tf.function(jit_compile=True)
    def step(ids: Any, rate: Any, count: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = compute(weights, ids[:, :-1])
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(ids[:, 1:], logits))
        gradients = tape.gradient(loss, [variables[name] for name in variables])
        norm = tf.sqrt(sum(tf.reduce_sum(gradient * gradient) for gradient in map(tf.convert_to_tensor, gradients)))
        for name, gradient in zip(variables, map(tf.convert_to_tensor, gradients), strict=True):
            clipped = gradient * tf.minimum(1.0, 1.0 / norm)
            first, second = (moment[name] for moment in moments)
            first.assign(0.9 * first + 0.1 * clipped)
            second.assign(0.98 * second + 0.02 * clipped * clipped)
            scaled = (first / (1 - 0.9**count)) / (tf.sqrt(second / (1 - 0.98**count)) + 1e-8)
            variables[name].assign_sub(rate * scaled)
        return loss

    batches = windows(text, BATCH * steps, seed=1).reshape(steps, BATCH, CONTEXT + 1)
    for index, ids in enumerate(batches):
        rate = RATE * min((index + 1) / WARM_UP, 0.5 + 0.5 * np.cos(np.pi * index / steps))
        loss = step(tf.constant(ids), tf.constant(rate, tf.float32), tf.constant(index + 1.0))
        if index % 50 == 0 or index == steps - 1:
            print(f"  step {index}: {float(loss) / np.log(2):.3f} bits per byte", flush=True)
    for tensor in floats:
        if tensor.name in variables:
            tensor.CopyFrom(numpy_helper.from_array(variables[tensor.name].numpy(), tensor.name))
    ids = batches[0][:2, :-1]
    session = onnxruntime.InferenceSession(message.SerializeToString(), providers=["CPUExecutionProvider"])
    logits = session.run(["logits"], feeds(DECODER, ids))[0]
    np.testing.assert_allclose(logits, compute(weights, tf.constant(ids)).numpy(), rtol=1e-3, atol=1e-3)


def bits_per_byte(path: Path, ids: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return the mean of -log2 of the probabilities of the next bytes, and the bytes of all states at the end."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    types = {spec.name: np.int8 if "int8" in spec.type else np.float32 for spec in session.get_inputs()}
    shape = (len(ids), DECODER.kv_heads, 0, DECODER.head_size)
    past = [np.zeros(shape, types[name]) for name in state_names(DECODER, "past_key_values")]
    prompt, bits = CONTEXT // 2, []
    for start, stop in [(0, prompt), *((place, place + 1) for place in range(prompt, CONTEXT))]:
        logits, *past = session.run(None, feeds(DECODER, ids[:, start:stop], past))
        logits = logits.astype(np.float64) - logits.max(-1, keepdims=True)
        chosen = np.take_along_axis(logits, ids[:, start + 1 : stop + 1, None], -1)[..., 0]
        bits.append((np.log(np.exp(logits).sum(-1)) - chosen) / np.log(2))
    return float(np.concatenate(bits, 1).mean()), float(sum(state.nbytes for state in past))


def main() -> int:
    """Train, quantize and print a table; 1 if a quantized model loses more than `MAX_LOSS`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps of the training")
    parser.add_argument("--folder", type=Path, help="keep the models here, and use a trained one")
    options = parser.parse_args()
    text, held_out = read_modules(TRAINING_MODULES), read_modules(HELD_OUT_MODULES)
    digest = hashlib.sha256(text.tobytes() + held_out.tobytes()).hexdigest()[:12]
    print(f"{len(text):,} bytes to train, {len(held_out):,} held out, Python {platform.python_version()}, {digest}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "float.onnx"
        if not path.exists():
            start, wall, message = time.process_time(), time.perf_counter(), build_decoder(DECODER)
            train(message, text, options.steps)
            count = sum(int(np.prod(tensor.dims)) for tensor in message.graph.initializer)
            seconds = (
                f"{time.process_time() - start:.0f} s of processor time, {time.perf_counter() - wall:.0f} s in all"
            )
            print(f"{count:,} weights, {BATCH * CONTEXT * options.steps:,} bytes seen, {seconds}")
            onnx.save(message, path)
        data = [feeds(DECODER, ids[None, :-1]) for ids in windows(text, CALIBRATION_TEXTS, seed=2)]
        ids = windows(held_out, TEXTS, seed=3)
        runs: dict[str, dict[str, Any] | None] = {
            "float": None,
            "int8, rules onnxruntime": {"data": data},
            "int8 weights": {"rules": "weight_only_int8"},
            "int4 weights": {"rules": "weight_only_int4"},
            "int4 weights, gptq": {
                "rules": "weight_only_int4",
                "algorithms": "gptq",
                "data": data,
                "min_sqnr": "none",
            },
            "dynamic": {"rules": "dynamic"},
            "int8 cache, per channel": {"exclude": "*", "data": data, "kv_cache": "int8"},
            "int8 cache, per tensor": {"exclude": "*", "data": data, "kv_cache": "int8-per-tensor"},
            "int4 weights, int8 cache": {
                "rules": "weight_only_int4",
                "data": data,
                "kv_cache": "int8",
                "min_sqnr": "none",  # otherwise a repair may give some weights 8 bits
            },
        }
        expected, failed = 0.0, 0
        print(f"{'model':26} {'file':>9} {'states':>9} {'bits per byte':>14} {'change':>8}")
        for name, arguments in runs.items():
            out = path if arguments is None else folder / f"{name.replace(', ', '-').replace(' ', '-')}.onnx"
            if arguments is not None:
                gq.insert(path, **arguments).save(out, force=True)
            bits, states = bits_per_byte(out, ids)
            expected = expected or bits
            change = bits / expected - 1
            failed |= change > MAX_LOSS.get(name, np.inf)
            sizes = f"{out.stat().st_size / 1e6:6.2f} MB {states / 1e6:6.2f} MB"
            print(f"{name:26} {sizes} {bits:14.4f} {100 * change:+7.2f}%", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
