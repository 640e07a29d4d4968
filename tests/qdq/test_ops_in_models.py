"""Each TensorFlow family in a model that TensorFlow runs, bit for bit like its numpy reference."""

import re
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import fake_quant
from reference import quantize_and_dequantize as qad
from support.pairwise import cover_pairs
from support.qparams import choose_qparams
from support.tensorflow_models import graph_session

import graphquant as gq
from graphquant.analysis.model_summary import summarize_model
from graphquant.errors import RuleError
from graphquant.ir import Graph, Model, Op, Output, Parameters
from graphquant.numerics import DynamicQParams, IntType, Range, tf_ranges
from graphquant.qdq import FAMILIES, FamilyRequest, QDQSite
from graphquant.rules import load_ruleset

RULES = """
[scheme.s]
{scheme}

[[rule]]
name = "all"
consumer = {{ kind = "conv|depthwise_conv|matmul", input = "{role}" }}
quantize = "s"
"""
FIXED = 'observe = {name = "fixed", low = -1.5, high = 0.75}'
WEIGHTS = {"conv": 3, "depthwise": 2, "product": 1}
"""The ops of the model and the channel axis of their weights."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Write, for each dtype, a frozen graph with a convolution, a depthwise convolution and a matrix product."""
    return {dtype: frozen(tmp_path_factory.mktemp(dtype) / "net.pb", dtype) for dtype in ("float32", "float64")}


def frozen(path, dtype):
    """Write such a graph."""
    tf = pytest.importorskip("tensorflow").compat.v1
    rng = np.random.default_rng(3)
    sizes = {"conv": (3, 3, 3, 4), "depthwise": (3, 3, 4, 1), "product": (4, 5)}
    weights = {name: rng.normal(size=size).astype(dtype) for name, size in sizes.items()}
    with tf.Graph().as_default() as graph:
        x = tf.placeholder(dtype, [1, 6, 6, 3], name="x")
        y = tf.nn.conv2d(x, tf.constant(weights["conv"], name="wc"), 1, "SAME", name="conv")
        y = tf.nn.depthwise_conv2d_native(
            y, tf.constant(weights["depthwise"], name="wd"), [1, 1, 1, 1], "SAME", name="depthwise"
        )
        y = tf.reshape(y, [36, 4])
        tf.identity(tf.matmul(y, tf.constant(weights["product"], name="wp"), name="product"), name="out")
    path.write_bytes(graph.as_graph_def().SerializeToString())
    return path


@contextmanager
def session(made, tmp_path):
    """Open the written model in a session with initialized variables."""
    with graph_session(made.save(tmp_path / "made.pb", force=True)) as opened:
        if any(op.name == "init_learned_ranges" for op in opened.graph.get_operations()):
            opened.run("init_learned_ranges")
        yield opened


def model_input(dtype="float32"):
    """Return the model's input."""
    return np.random.default_rng(4).normal(size=(1, 6, 6, 3)).astype(dtype)


def written_values(made, tmp_path, wanted, dtype="float32"):
    """Return TensorFlow's values of the tensors in `wanted`, in the written model."""
    with session(made, tmp_path) as opened:
        return opened.run(wanted, {"x:0": model_input(dtype)})


def insert_scheme(path, tmp_path, scheme, role):
    """Quantize a model with one rule."""
    (tmp_path / "r.toml").write_text(RULES.format(scheme=scheme, role=role))
    return gq.insert(path, rules=[str(tmp_path / "r.toml")])


def bits_of(array):
    """Return the bits of an array as integers."""
    array = np.ascontiguousarray(array)
    return array.view(np.dtype(f"int{8 * array.itemsize}"))


def assert_equal_bits(arrays, expected):
    """Assert that there are as many arrays as expected, with the same bits."""
    for array, reference in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(bits_of(array), bits_of(reference))


def ends_of(family, params, dtype):
    """Return the range that is written to the op."""
    if params.op_range is not None:
        return params.op_range
    if dtype == "float64":
        return params.range
    return (
        tf_ranges.range_for_fake_quant(params)
        if family == "fake-quant"
        else tf_ranges.range_for_quantize_and_dequantize(params)
    )


def reference_of_params(family, before, params, *, rounding, form):
    """Return the result of the family's numpy reference."""
    kind = params.type
    if isinstance(params, DynamicQParams):
        axis = -1 if params.axis is None else params.axis
        more = {} if family.endswith("v3") else {"round_mode": qad_mode(rounding), "num_bits": kind.bits}
        positional = (0.0, 0.0, kind.bits) if family.endswith("v3") else (0.0, 0.0)
        call = qad.quantize_and_dequantize_v3 if family.endswith("v3") else qad.quantize_and_dequantize_v2
        signed, narrow = kind.signed, params.narrow
        return call(before, *positional, signed_input=signed, range_given=False, narrow_range=narrow, axis=axis, **more)
    ends = ends_of(family, params, str(before.dtype))
    if family == "fake-quant":
        more = {"num_bits": kind.bits, "narrow_range": params.narrow and kind.signed}
        if form == "args":
            return fake_quant.fake_quant_with_args(before, low=float(ends.low), high=float(ends.high), **more)
        if params.axis is None:
            return fake_quant.fake_quant_with_vars(before, ends.low, ends.high, **more)
        last = np.moveaxis(before, params.axis, -1)
        quantized = fake_quant.fake_quant_with_vars_per_channel(np.ascontiguousarray(last), ends.low, ends.high, **more)
        return np.moveaxis(quantized, -1, params.axis)
    more = {"signed_input": kind.signed, "narrow_range": params.narrow, "range_given": True}
    if family.endswith("v3"):
        axis = -1 if params.axis is None else params.axis
        return qad.quantize_and_dequantize_v3(before, ends.low, ends.high, kind.bits, axis=axis, **more)
    return qad.quantize_and_dequantize_v2(
        before, ends.low, ends.high, num_bits=kind.bits, round_mode=qad_mode(rounding), **more
    )


def qad_mode(rounding):
    """Return the op's name of a rounding mode."""
    return "HALF_UP" if rounding == "half-up" else "HALF_TO_EVEN"


FAMILIES_HERE = ["fake-quant", "quantize-and-dequantize-v2", "quantize-and-dequantize-v3", "quantize-and-dequantize-v4"]
ROUNDINGS = {"fake-quant": ["half-up"], "quantize-and-dequantize-v3": ["half-even"]}
SOURCES = {"fake-quant": ["observed", "given", "learned"]}
"""The roundings and sources of ranges that a family has; the others have all."""


def table():
    """Return for each family every pair of argument values, and every triple with the sign and the narrow range."""
    return [(family, *case) for family in FAMILIES_HERE for case in cover_pairs(combinations_of(family))]


def combinations_of(family):
    """Yield every combination of a family's argument values. Sign and narrow range are one value."""
    fake = family == "fake-quant"
    for bits, signs, rounding, source, form, dtype in product(
        (2, 8, 16) if fake else (2, 8, 24, 32),
        tuple(product((True, False), repeat=2)),
        ROUNDINGS.get(family, ["half-even", "half-up"]),
        SOURCES.get(family, ["observed", "given", "dynamic", "learned"]),
        ("vars", "args") if fake else (None,),
        ("float32",) if fake else ("float32", "float64"),
    ):
        if (form, source) == ("args", "learned"):
            continue  # refused
        for zero in ("symmetric", "asymmetric") if fake and source != "given" else ("asymmetric",) if fake else (None,):
            yield bits, signs, rounding, source, form, zero, dtype


def lines_of(family, bits, signed, narrow, rounding, source, form, zero):
    """Return the lines of a scheme."""
    lines = [f'family = "{family}"', f"bits = {bits}", f"signed = {str(signed).lower()}"]
    lines += [f"narrow = {str(narrow).lower()}", f'round = "{rounding}"', f'range = "{source}"']
    lines += [f'args = {{form = "{form}"}}'] if form else []
    return "\n".join(lines + ([f'zero = "{zero}"'] if zero else []))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "bits", "signs", "rounding", "source", "form", "zero", "dtype"), table())
def test_every_argument_of_every_family(
    models, tmp_path, family, bits, signs, rounding, source, form, zero, dtype
) -> None:
    """Activations per tensor, and weights per channel if supported, equal the reference's."""
    scheme = lines_of(family, bits, *signs, rounding, source, form, zero)
    channel = form != "args" and (source == "dynamic" or family in {"fake-quant", "quantize-and-dequantize-v3"})
    for role, lines in (
        ("input", f"{scheme}\n{FIXED}"),
        ("weight", scheme + '\nobserve = "absmax"' + ('\nper = "channel"' if channel else "")),
    ):
        result = insert_scheme(models[dtype], tmp_path, lines, role)
        assert len(result.inserted) == 3, result.skips
        names = [(str(inserted_site.site.tensor), str(inserted_site.output)) for inserted_site in result.inserted]
        for inserted_site, (before, after) in zip(
            result.inserted, written_values(result, tmp_path, names, dtype), strict=True
        ):
            assert before.dtype == dtype
            assert inserted_site.params.axis == (
                WEIGHTS[inserted_site.site.uses[0].op] if channel and role == "weight" else None
            )
            if source == "given" and role == "input":
                assert (inserted_site.params.op_range.low, inserted_site.params.op_range.high) == (-1.5, 0.75)
            expected = reference_of_params(family, before, inserted_site.params, rounding=rounding, form=form)
            np.testing.assert_array_equal(bits_of(after), bits_of(expected))


GRADIENTS = [
    (family, source, form, dtype)
    for family in FAMILIES_HERE
    for source in SOURCES.get(family, ["observed", "given", "dynamic", "learned"])
    for form in (("vars", "args") if family == "fake-quant" else (None,))
    for dtype in (("float32",) if family == "fake-quant" else ("float32", "float64"))
    if (form, source) != ("args", "learned")
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "source", "form", "dtype"), GRADIENTS)
def test_gradients_of_every_family(models, tmp_path, family, source, form, dtype) -> None:
    """Gradients of the tensor, and of FakeQuant's range, equal the reference's."""
    import tensorflow as tf

    scheme = f'family = "{family}"\nrange = "{source}"\n{FIXED}'
    scheme += '\nzero = "asymmetric"' if family == "fake-quant" else ""
    scheme += f'\nargs = {{form = "{form}"}}' if form else ""
    if (family, source) == ("quantize-and-dequantize-v4", "dynamic"):
        scheme += "\nargs = {input_min = -1.0, input_max = 0.5}"
    result = insert_scheme(models[dtype], tmp_path, scheme, "input")
    inserted_site, x = result.inserted[0], model_input(dtype)
    assert inserted_site.site.tensor.op == "x"
    upstream = np.random.default_rng(5).normal(size=x.shape).astype(dtype)
    with session(result, tmp_path) as opened:
        graph = opened.graph
        quantize_op = graph.get_operation_by_name(inserted_site.output.op)
        sources = [graph.get_tensor_by_name("x:0"), *(quantize_op.inputs[1:3])]
        gradients = tf.compat.v1.gradients(quantize_op.outputs[0], sources, grad_ys=tf.constant(upstream))
        gradients = opened.run([gradient for gradient in gradients if gradient is not None], {"x:0": x})
    if family == "fake-quant":
        ends = ends_of(family, inserted_site.params, dtype)
        if form == "args":
            expected = [
                fake_quant.fake_quant_with_args_gradient(upstream, x, low=float(ends.low), high=float(ends.high))
            ]
        else:
            expected = fake_quant.fake_quant_with_vars_gradient(upstream, x, ends.low, ends.high)
    elif family.endswith("v4"):
        limits = None if source == "dynamic" else ends_of(family, inserted_site.params, dtype)
        expected = qad.quantize_and_dequantize_v4_gradient(
            upstream, x, *((limits.low, limits.high) if limits else (-1.0, 0.5))
        )
    else:
        expected = [qad.straight_through_gradient(upstream)]
    assert_equal_bits(gradients, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "source"),
    [
        ("fake-quant", "observed"),
        ("fake-quant", "learned"),
        ("quantize-and-dequantize-v2", "dynamic"),
        ("quantize-and-dequantize-v3", "observed"),
        ("quantize-and-dequantize-v4", "dynamic"),
    ],
)
def test_gradients_per_channel(models, tmp_path, family, source) -> None:
    """Gradients of a kernel and of its channels' ranges equal the reference's."""
    import tensorflow as tf

    scheme = f'family = "{family}"\nrange = "{source}"\nper = "channel"\n'
    scheme += 'observe = {name = "fixed", low = -0.5, high = 0.25}\n'
    scheme += "args = {input_min = -1.0, input_max = 0.5}" if family.endswith("v4") else ""
    result = insert_scheme(models["float32"], tmp_path, scheme, "weight")
    inserted_site = next(candidate for candidate in result.inserted if candidate.site.uses[0].op == "conv")
    with session(result, tmp_path) as opened:
        kernel = opened.graph.get_tensor_by_name(str(inserted_site.site.tensor))
        quantize_op = opened.graph.get_operation_by_name(inserted_site.output.op)
        value = opened.run(kernel)
        upstream = np.random.default_rng(6).normal(size=value.shape).astype(np.float32)
        gradients = tf.compat.v1.gradients(
            quantize_op.outputs[0], [kernel, *quantize_op.inputs[1:3]], grad_ys=tf.constant(upstream)
        )
        gradients = opened.run([gradient for gradient in gradients if gradient is not None])
    if family == "fake-quant":
        ends = tf_ranges.range_for_fake_quant(inserted_site.params)
        expected = fake_quant.fake_quant_with_vars_per_channel_gradient(upstream, value, ends.low, ends.high)
    elif family.endswith("v4"):
        ends = np.full(4, -1, np.float32), np.full(4, 0.5, np.float32)
        expected = qad.quantize_and_dequantize_v4_gradient(upstream, value, *ends, axis=3)
    else:
        expected = [qad.straight_through_gradient(upstream)]
    assert_equal_bits(gradients, expected)


@pytest.mark.slow
def test_inspect_reads_params_back(models, tmp_path) -> None:
    """A dynamic site needs no data, and `inspect` shows it as dynamic with its axis and rounding."""
    scheme = 'family = "quantize-and-dequantize-v4"\nrange = "dynamic"\nper = "channel"\nround = "half-up"'
    result = insert_scheme(models["float32"], tmp_path, scheme, "weight")
    result.save(tmp_path / "made.pb")
    readings = summarize_model(gq.load(tmp_path / "made.pb")).quantization_ops
    assert [(reading.params, reading.rounding) for reading in readings] == [
        (DynamicQParams(type=IntType(8, True), axis=axis), "half-up") for axis in WEIGHTS.values()
    ]


@given(
    family=st.sampled_from([name for name in FAMILIES if name.startswith("quantize-and")]),
    bits=st.integers(2, 30),
    signed=st.booleans(),
    narrow=st.booleans(),
    high=st.floats(2.0**-60, 2.0**60),
    dynamic=st.booleans(),
    half_up=st.booleans(),
)
@settings(deadline=None)
def test_added_ops_are_read_back(family, bits, signed, narrow, high, dynamic, half_up) -> None:
    """Scale, bits, sign, narrow range and rounding are read from the ops exactly."""
    model = Model(format="tensorflow")
    graph = model.graphs[""] = Graph("", model.graphs)
    tensor = graph.add_op(Op(name="t", kind="relu", type="Relu", outputs=(Output("t", "float32", (2,)),)))
    kind, narrow = IntType(bits, signed), narrow and signed
    rounding = "half-up" if half_up and not family.endswith("v3") else "half-even"
    low = -high if signed else 0.0
    params = choose_qparams(Range(low, high), kind, symmetric=signed, narrow=narrow)
    expected = DynamicQParams(type=kind, narrow=narrow) if dynamic else FAMILIES[family].effective_params(params)
    site = QDQSite(tensor=tensor, name="q", params=expected, rule="r", shape=(2,), rounding_mode=rounding)
    output = FAMILIES[family].add_ops(graph, site)
    actual = FAMILIES[family].read_params(graph, graph.op(output.op), Parameters(model))
    assert FAMILIES[family].rounding_mode_of(graph.op(output.op)) == rounding
    if dynamic:
        assert actual == expected
        return
    assert (actual.type, actual.narrow, actual.scale, actual.zero_point) == (kind, narrow, expected.scale, 0)
    assert abs(float(actual.scale) / float(params.scale) - 1) < 2.0**-22


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ('family = "fake-quant"\nround = "half-even"', "FakeQuant .*'round'"),
        ('family = "quantize-and-dequantize-v3"\nround = "half-up"', "DequantizeV3 .*'round'"),
        ('family = "quantize-and-dequantize-v2"\nzero = "asymmetric"', "no zero point"),
        ('family = "quantize-and-dequantize-v2"\nargs = {form = "args"}', "has no 'form'"),
        ('family = "fake-quant"\nrange = "dynamic"', "needs a range"),
        ('family = "fake-quant"\nargs = {form = "arg"}', "'vars', 'args'"),
        ('family = "fake-quant"\nargs = {form = "packed"}', "'vars' and 'args'"),
        ('family = "fake-quant"\nargs = {from = "args"}', "'from' .*arguments"),
        ('args = {form = "args"}', "'family'"),
        (
            'family = "quantize-and-dequantize-v4"\nrange = "dynamic"\nargs = {input_min = 2.0, input_max = 1.0}',
            "'input_min' 2.0 is above",
        ),
    ],
)
def test_unsupported_schemes_are_rejected(tmp_path, scheme: str, said: str) -> None:
    """A scheme that its family does not support is an error in the rule file, with its line and a remedy."""
    path = tmp_path / "r.toml"
    path.write_text(RULES.format(scheme=scheme, role="weight"))
    with pytest.raises(RuleError) as error:
        load_ruleset([str(path)])
    assert re.search(said, str(error.value))
    assert f"{path}:" in str(error.value)


@pytest.mark.parametrize("version", [2, 4])
def test_a_range_per_channel_needs_v3(version: int) -> None:
    """V2 and V4 have no kernel for a range per channel, and the reason names a remedy. They support dynamic ranges."""
    why_not = FAMILIES[f"quantize-and-dequantize-v{version}"].unsupported_reason
    request_fields = {"type": IntType(8, True), "axis": 1, "dtype": "float32", "shape": (2, 3)}
    assert "quantize-and-dequantize-v3 or fake-quant" in why_not(FamilyRequest(**request_fields))
    assert why_not(FamilyRequest(**request_fields, range_source="dynamic")) is None


def test_types_and_shapes_without_a_kernel() -> None:
    """V3 supports float64, and half precision, which is cast to float32; V2 replaces it for scalars."""
    why_not = FAMILIES["quantize-and-dequantize-v3"].unsupported_reason
    for dtype in ("float16", "bfloat16"):
        assert why_not(FamilyRequest(type=IntType(8, True), axis=None, dtype=dtype, shape=(2,))) is None
    assert why_not(FamilyRequest(type=IntType(8, True), axis=None, dtype="float32", shape=())) is None
    assert why_not(FamilyRequest(type=IntType(8, True), axis=None, dtype="float64", shape=(2,))) is None


def test_v2_replaces_v3_for_tensors_that_may_be_scalars(tmp_path):
    """V3's kernel refuses scalars. A constant is one, and a placeholder of unknown rank may be one."""
    tf = pytest.importorskip("tensorflow").compat.v1
    values = np.random.default_rng(0)
    with tf.Graph().as_default() as graph:
        x, k = tf.placeholder("float32", [None, 8], name="x"), tf.placeholder("float32", None, name="k")
        weight = tf.constant(values.normal(size=(8, 4)).astype(np.float32), name="weight")
        tf.identity(tf.matmul(x * k, weight) / (k * tf.constant(0.3, name="c")), name="out")
    (tmp_path / "net.pb").write_bytes(graph.as_graph_def().SerializeToString())
    data = {"x": values.normal(size=(40, 8)).astype(np.float32), "k": np.float32(0.7)}
    result = gq.insert(tmp_path / "net.pb", family="quantize-and-dequantize-v3", data=data)
    types = {str(pair.site.tensor): result.model.op(pair.output).type[-2:] for pair in result.inserted}
    assert {types[name] for name in ("k:0", "c:0")} == {"V2"}
    assert {types[name] for name in ("x:0", "weight:0")} == {"V3"}
    assert result.validation.worst_sqnr > 20
