"""Compares the numpy references of TensorFlow's quantization ops with TensorFlow, bit for bit.

Run it as `python tests/numerics/against_tensorflow.py [cases per op] [seed]`. It prints a line per op: how many cases
came from the seed, how many from hypothesis, and how many did not agree; and ends with code 1 if any did not.

Everything counts, denormals, infinities, NaN and signed zeros too; only not which NaN it is. TensorFlow runs with one
thread, because it sums large tensors in another order with more.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import hypothesis
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
import tensorflow as tf

sys.path[:0] = [str(Path(__file__).resolve().parents[depth]) for depth in (2, 1)]
from reference import fake_quant, quantize_and_dequantize  # noqa: E402

from graphquant.errors import UsageError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]
SHAPES = [(), (0,), (1,), (3,), (7,), (8,), (31,), (33,), (70,), (3, 5), (1, 1), (4, 0), (0, 3), (17, 3), (2, 3, 4)]
SHAPES += [(5, 1, 9), (2, 3, 3, 2), (1, 9, 2, 7), (2, 0, 3, 1), (300,), (40, 6)]
REFUSED, FIRST = "refused", "QuantizeAndDequantize"


@dataclass
class Case:
    """The arguments of one call of both implementations."""

    op: str
    tensors: dict[str, Array]
    arguments: dict[str, Any] = field(default_factory=dict)


def outcomes_agree(expected: Any, got: Any) -> bool:
    """Return True if two outputs, or tuples of outputs, have the same type, shape and bits."""
    if REFUSED in (refusals := [outcome for outcome in (expected, got) if isinstance(outcome, str)]):
        return len(refusals) == 2
    if isinstance(expected, tuple):
        return len(expected) == len(got) and all(outcomes_agree(*pair) for pair in zip(expected, got, strict=True))
    if expected.dtype != got.dtype or expected.shape != got.shape:
        return False
    integers = np.dtype(f"int{8 * expected.itemsize}")
    expected, got = np.ascontiguousarray(expected), np.ascontiguousarray(got)
    same = (expected.view(integers) == got.view(integers)) | (np.isnan(expected) & np.isnan(got))
    return bool(same.all())


# --- cases ------------------------------------------------------------------------------------------------------------


def random_subset(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, low: Any, high: Any, bits: int
) -> Array:
    """Draw values for a range: inside and around it, halfway between steps, of all magnitudes, and special values."""
    limits = np.finfo(dtype)
    kind = rng.integers(8)
    with np.errstate(all="ignore"):
        span = np.float64(high) - np.float64(low)
        if kind <= 2:
            x = low - span / 4 + rng.random(shape) * span * 1.5
        elif kind == 3:
            x = (rng.integers(-(2 ** min(bits, 9)), 2 ** min(bits, 9), shape) + 0.5) * span / (2 ** float(bits) - 1)
        elif kind == 4:
            x = rng.normal(size=shape) * np.exp(rng.normal(size=shape) * 20)
        elif kind == 5:
            x = rng.integers(-4, 5, shape) * 0.5
        elif kind == 6:
            x = rng.normal(size=shape) * limits.tiny
        else:
            x = rng.normal(size=shape)
        x = np.asarray(x).astype(dtype)
    if rng.random() < 0.4 and x.size:
        special = [0.0, -0.0, np.inf, -np.inf, np.nan, limits.max, limits.min, limits.tiny, -limits.smallest_subnormal]
        if rng.random() < 0.5:
            special = special[:2]
        where = rng.integers(0, x.size, max(1, x.size // 4))
        x.reshape(-1)[where] = rng.choice(np.array(special, dtype), where.shape)
    return x


def ends(
    rng: np.random.Generator, dtype: Any, shape: tuple[int, ...], *, ordered: bool, bits: int
) -> tuple[Array, Array]:
    """Draw a range, or one per channel: ordinary, huge, tiny, one-sided, exact, empty."""
    limits = np.finfo(dtype)
    kind = rng.integers(10)
    size = np.exp(rng.uniform(-6, 6))
    if kind == 0:
        size = np.exp(rng.uniform(np.log(limits.tiny) + 1, np.log(limits.max) - 3))
    with np.errstate(all="ignore"):
        range_limits = rng.normal(size=(2, *shape)) * size
        if kind in (1, 2):
            range_limits = np.stack([-np.abs(range_limits[0]), np.abs(range_limits[1])])
        elif kind == 3:
            range_limits = np.stack([-range_limits[0], range_limits[0]])
        elif kind == 4:
            unit = 2.0 ** rng.integers(-10, 10)
            range_limits = np.stack(
                [np.full(shape, -(2.0 ** (bits - 1)) + rng.integers(2)), np.full(shape, 2.0 ** (bits - 1) - 1)]
            )
            range_limits = range_limits * unit
        elif kind == 5:
            range_limits = rng.choice([0.0, -0.0, 1.0, -1.0, 6.0, 2.5], (2, *shape))
        elif kind == 6:
            special = [
                0.0,
                limits.max,
                limits.min,
                limits.tiny,
                -limits.tiny,
                limits.smallest_subnormal,
                np.inf,
                -np.inf,
                1,
            ]
            range_limits = rng.choice(np.array(special), (2, *shape))
        range_limits = range_limits.astype(dtype)
    if ordered:
        range_limits = np.sort(range_limits, axis=0)
    elif kind == 7:
        range_limits = np.where(rng.random(range_limits.shape) < 0.1, np.nan, range_limits).astype(dtype)
    return range_limits[0], range_limits[1]


def qad_case(rng: np.random.Generator, op: str) -> Case:
    """Draw a case of QuantizeAndDequantize V1 to V4."""
    dtype = rng.choice([np.float32, np.float64])
    signed, range_given = bool(rng.integers(2)), bool(rng.integers(2))
    bits = int(rng.choice([8, 8, 4, 16, rng.integers(1, 62 if signed else 63)]))
    shape = SHAPES[rng.integers(len(SHAPES))]
    axis = -1
    if op != FIRST and shape and (op == "QuantizeAndDequantizeV3" or not range_given):
        axis = int(rng.integers(-1, len(shape)))
    if op == "QuantizeAndDequantizeV3":
        shape = shape or (1,)
    channels = () if axis == -1 else (shape[axis],)
    low, high = ends(rng, np.float32 if op == FIRST else dtype, channels, ordered=axis == -1, bits=bits)
    wide = low.min(initial=0), high.max(initial=0)
    tensors = {"input": random_subset(rng, shape, dtype, *wide, bits)}
    arguments: dict[str, Any] = {"signed_input": signed, "num_bits": bits, "range_given": range_given}
    if op == FIRST:
        return Case(op, tensors, arguments | {"input_min": float(low), "input_max": float(high)})
    tensors |= {"input_min": low, "input_max": high}
    arguments |= {"narrow_range": bool(rng.integers(2)), "axis": axis}
    if op != "QuantizeAndDequantizeV3":
        arguments["round_mode"] = str(rng.choice(["HALF_TO_EVEN", "HALF_UP"]))
    return Case(op, tensors, arguments)


def qad_gradient_case(rng: np.random.Generator, op: str) -> Case:
    """Draw a case of QuantizeAndDequantizeV4Grad."""
    dtype = rng.choice([np.float32, np.float64])
    shape = SHAPES[rng.integers(len(SHAPES))]
    axis = int(rng.integers(-1, len(shape))) if shape else -1
    low, high = ends(rng, dtype, () if axis == -1 else (shape[axis],), ordered=bool(rng.integers(2)), bits=8)
    x = random_subset(rng, shape, dtype, low.min(initial=0), high.max(initial=0), 8)
    gradients = random_subset(rng, shape, dtype, -1, 1, 8)
    return Case(op, {"gradients": gradients, "input": x, "input_min": low, "input_max": high}, {"axis": axis})


def fake_case(rng: np.random.Generator, op: str) -> Case:
    """Draw a case of the six FakeQuant ops."""
    bits = int(rng.integers(2, 17))
    arguments: dict[str, Any] = {"num_bits": bits, "narrow_range": bool(rng.integers(2))}
    shape = SHAPES[rng.integers(len(SHAPES))]
    if rng.random() < 0.01:
        shape = (int(rng.integers(8000, 20000)),)
    if "PerChannel" in op:
        shape = shape or (2,)
    fixed = "Args" in op
    channels = (shape[-1],) if "PerChannel" in op else ()
    low, high = ends(rng, np.float32, channels, ordered=fixed or bool(rng.integers(2)), bits=bits)
    tensors = {"inputs": random_subset(rng, shape, np.float32, low.min(initial=0), high.max(initial=0), bits)}
    if "Gradient" in op:
        tensors = {"gradients": random_subset(rng, shape, np.float32, -1, 1, bits), **tensors}
    if fixed:
        return Case(op, tensors, arguments | {"min": float(low), "max": float(high)})
    return Case(op, tensors | {"min": low, "max": high}, arguments)


# --- both sides -------------------------------------------------------------------------------------------------------


def tensorflow_arrays(case: Case) -> Any:
    """Return TensorFlow's arrays, or that it rejects the case."""
    try:
        if case.op == FIRST:
            return first_version([case])[0]
        call = getattr(tf.raw_ops, case.op)
        result = call(
            **{name: tf.constant(np.asarray(value)) for name, value in case.tensors.items()}, **case.arguments
        )
    except (tf.errors.InvalidArgumentError, ValueError):
        return REFUSED
    return tuple(output.numpy() for output in result) if isinstance(result, tuple) else result.numpy()


def first_version(cases: list[Case]) -> list[Any]:
    """Run QuantizeAndDequantize V1, which is supported only in graphs of old producers."""
    text = tf.compat.v1.GraphDef()
    text.versions.producer = 21
    feeds, fetches = {}, []
    for number, case in enumerate(cases):
        placeholder = text.node.add(name=f"x{number}", op="Placeholder")
        node = text.node.add(name=f"y{number}", op="QuantizeAndDequantize", input=[placeholder.name])
        placeholder.attr["dtype"].type = node.attr["T"].type = tf.as_dtype(case.tensors["input"].dtype).as_datatype_enum
        for name, value in case.arguments.items():
            setattr(node.attr[name], {bool: "b", int: "i", float: "f"}[type(value)], value)
        feeds[f"x{number}:0"] = case.tensors["input"]
        fetches.append(f"y{number}:0")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.import_graph_def(text, name="")
        return session.run(fetches, feeds)


def numpy_arrays(case: Case) -> Any:
    """Return numpy's arrays, or that it rejects the case."""
    names = {"input": "x", "inputs": "x", "min": "low", "max": "high"}
    arguments = {names.get(name, name): value for name, value in {**case.tensors, **case.arguments}.items()}
    try:
        return REFERENCES[case.op](**arguments)
    except UsageError:
        return REFUSED


REFERENCES: dict[str, Callable[..., Any]] = {
    "QuantizeAndDequantize": quantize_and_dequantize.quantize_and_dequantize_v1,
    "QuantizeAndDequantizeV2": quantize_and_dequantize.quantize_and_dequantize_v2,
    "QuantizeAndDequantizeV3": quantize_and_dequantize.quantize_and_dequantize_v3,
    "QuantizeAndDequantizeV4": quantize_and_dequantize.quantize_and_dequantize_v4,
    "QuantizeAndDequantizeV4Grad": quantize_and_dequantize.quantize_and_dequantize_v4_gradient,
    "FakeQuantWithMinMaxArgs": fake_quant.fake_quant_with_args,
    "FakeQuantWithMinMaxArgsGradient": fake_quant.fake_quant_with_args_gradient,
    "FakeQuantWithMinMaxVars": fake_quant.fake_quant_with_vars,
    "FakeQuantWithMinMaxVarsGradient": fake_quant.fake_quant_with_vars_gradient,
    "FakeQuantWithMinMaxVarsPerChannel": fake_quant.fake_quant_with_vars_per_channel,
    "FakeQuantWithMinMaxVarsPerChannelGradient": fake_quant.fake_quant_with_vars_per_channel_gradient,
}


def draw_case(op: str, rng: np.random.Generator) -> Case:
    """Draw a case of `op`."""
    if "FakeQuant" in op:
        return fake_case(rng, op)
    return qad_gradient_case(rng, op) if op.endswith("Grad") else qad_case(rng, op)


def seeded_cases(op: str, count: int, seed: int) -> list[Case]:
    """Return the cases, of `count`, on which TensorFlow and numpy differ."""
    rng = np.random.default_rng([seed, list(REFERENCES).index(op)])
    cases = [draw_case(op, rng) for _ in range(count)]
    results = first_version(cases) if op == FIRST else [tensorflow_arrays(case) for case in cases]
    return [case for case, result in zip(cases, results, strict=True) if not outcomes_agree(numpy_arrays(case), result)]


@st.composite
def random_cases(draw: Callable[..., Any], op: str) -> Case:
    """Draw a case whose values and ranges hypothesis chooses bit by bit, including invalid ranges."""
    case = draw_case(op, np.random.default_rng(draw(st.integers(0, 999))))
    for name, value in case.tensors.items():
        small = value.size <= 40  # hypothesis is slow at more
        floats = st.floats(width=8 * value.itemsize)
        if small:
            case.tensors[name] = draw(arrays(value.dtype, value.shape, elements=floats))
    for name in {"min", "max", "input_min", "input_max"} & {*case.arguments}:
        case.arguments[name] = draw(st.floats(width=32))
    return case


def differing_cases(op: str, count: int, seed: int) -> list[Case]:
    """Return the cases, of `count` drawn by hypothesis, on which TensorFlow and numpy differ."""
    differ = []

    @hypothesis.seed(seed)
    @settings(max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(random_cases(op))
    def check(case: Case) -> None:
        if not outcomes_agree(numpy_arrays(case), tensorflow_arrays(case)):
            differ.append(case)

    check()
    return differ


def refusals() -> list[Case]:
    """Return cases that both must reject, except those that end TensorFlow's process."""
    x = np.ones((2, 3), np.float32)
    limits, many = {"input_min": np.float32(-1), "input_max": np.float32(1)}, np.ones(3, np.float32)
    turned, lost = limits | {"input_min": np.float32(2)}, limits | {"input_max": np.float32(np.nan)}
    cases = []
    for op in ("QuantizeAndDequantizeV2", "QuantizeAndDequantizeV4", "QuantizeAndDequantizeV3"):
        bits = {"num_bits": 8} if op.endswith("3") else {}
        cases += [Case(op, {"input": x, **ends}, {"range_given": True} | bits) for ends in (turned, lost)]
        cases += [Case(op, {"input": x, **limits}, {"num_bits": bits}) for bits in (0, -1, 62, 63)]
        cases += [Case(op, {"input": x, **limits}, {"num_bits": 63, "signed_input": False})]
        cases += [Case(op, {"input": x, **limits}, {"axis": axis} | bits) for axis in (2, 9)]
        cases += [Case(op, {"input": x, **limits}, {"axis": 1, "range_given": True} | bits)]
    cases += [
        Case(op, {"input": x, **limits}, {"axis": -2}) for op in ("QuantizeAndDequantizeV2", "QuantizeAndDequantizeV4")
    ]
    cases.append(Case("QuantizeAndDequantizeV3", {"input": x[0, 0], **limits}, {"num_bits": 8}))
    cases.append(Case("QuantizeAndDequantizeV2", {"input": x, **limits}, {"round_mode": "HALF_DOWN"}))
    cases += [
        Case("QuantizeAndDequantizeV4Grad", {"gradients": x, "input": x, **limits}, {"axis": axis})
        for axis in (-2, 1, 2)
    ]
    cases.append(Case("QuantizeAndDequantizeV4Grad", {"gradients": many, "input": x, **limits}))
    for ends in ((1.0, 1.0), (2.0, 1.0), (float("nan"), 1.0)):
        cases.append(Case("FakeQuantWithMinMaxArgs", {"inputs": x}, dict(zip(("min", "max"), ends, strict=True))))
    scalars = {"min": np.float32(-1), "max": np.float32(1)}
    rows = {"min": -many, "max": many}
    for bits in (1, 0, 17):
        cases.append(Case("FakeQuantWithMinMaxArgs", {"inputs": x}, {"num_bits": bits}))
        cases.append(Case("FakeQuantWithMinMaxVars", {"inputs": x, **scalars}, {"num_bits": bits}))
        cases.append(Case("FakeQuantWithMinMaxVarsPerChannel", {"inputs": x, **rows}, {"num_bits": bits}))
    cases.append(Case("FakeQuantWithMinMaxVars", {"inputs": x, **rows}))
    cases.append(Case("FakeQuantWithMinMaxVarsPerChannel", {"inputs": x[:, :2], **rows}))
    cases.append(Case("FakeQuantWithMinMaxVarsPerChannel", {"inputs": x, **scalars}))
    cases.append(Case("FakeQuantWithMinMaxVarsPerChannelGradient", {"gradients": x, "inputs": x[:, :2], **rows}))
    return cases


def passes_straight_through() -> bool:
    """Return True if V1, V2 and V3 pass gradients unchanged for all values."""
    x, upstream = np.linspace(-9, 9, 7, dtype=np.float32), np.arange(7, dtype=np.float32)
    with tf.GradientTape(persistent=True) as tape:
        watched = tf.constant(x)
        tape.watch(watched)
        second = tf.raw_ops.QuantizeAndDequantizeV2(input=watched, input_min=-1.0, input_max=1.0, range_given=True)
        third = tf.raw_ops.QuantizeAndDequantizeV3(input=watched, input_min=-1.0, input_max=1.0, num_bits=8)
    text = tf.compat.v1.GraphDef()
    text.versions.producer = 21
    text.node.add(name="x", op="Placeholder").attr["dtype"].type = tf.float32.as_datatype_enum
    text.node.add(name="y", op="QuantizeAndDequantize", input=["x"]).attr["T"].type = tf.float32.as_datatype_enum
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        tf.import_graph_def(text, name="")
        source, result = (graph.get_tensor_by_name(name) for name in ("x:0", "y:0"))
        gradients = [session.run(tf.gradients(result, source, grad_ys=tf.constant(upstream))[0], {source: x})]
    gradients += [tape.gradient(result, watched, output_gradients=upstream).numpy() for result in (second, third)]
    return all(
        outcomes_agree(quantize_and_dequantize.straight_through_gradient(upstream), gradient) for gradient in gradients
    )


def print_differences(count: int, seed: int) -> int:
    """Print the table and return the exit code."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    click.echo(f"TensorFlow {tf.__version__}, numpy {np.__version__}, seed {seed}")
    click.echo(f"{'op':<42} {'seeded':>8} {'hypothesis':>11} {'mismatches':>11}")
    totals, examples = np.zeros(3, int), count // 20
    for op in REFERENCES:
        differ = seeded_cases(op, count, seed) + differing_cases(op, examples, seed)
        totals += count, examples, len(differ)
        click.echo(f"{op:<42} {count:>8} {examples:>11} {len(differ):>11}")
        for case in differ[:3]:
            click.echo(f"{case} {numpy_arrays(case)}", err=True)
    refused = refusals()
    accepted = [case for case in refused if (numpy_arrays(case), tensorflow_arrays(case)) != (REFUSED, REFUSED)]
    totals += len(refused), 0, len(accepted) + (not passes_straight_through())
    click.echo(f"{'refused by both':<42} {len(refused):>8} {0:>11} {len(accepted):>11}")
    for case in accepted:
        click.echo(str(case), err=True)
    click.echo(f"{'total':<42} {totals[0]:>8} {totals[1]:>11} {totals[2]:>11}")
    click.echo(f"mismatches = {totals[2]}")
    return 1 if totals[2] else 0


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    sys.exit(print_differences(*(numbers + [2000, 20][len(numbers) :])))
