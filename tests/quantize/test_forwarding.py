"""Identity and Dropout taken out of ONNX models, and those that must stay."""

import numpy as np
import pytest
from support.onnx_models import load_onnx, run_onnx

import graphquant as gq
from graphquant.api.strip import prove_stripped
from graphquant.formats import onnx as onnx_format
from graphquant.quantize import find_skipped_steps, prepare

DROP_STEPS = ("drop-identity", "drop-dropout")


def test_identity_and_dropout_are_removed(tmp_path):
    """Chains of them too; who read them reads what they read, and the outputs are the same to the bit."""
    text = """(float[2,3] x) => (float[2,3] y, float[2,3] z) {
        a = Identity (x)  b = Dropout (a)  c = Identity (b)
        d = Relu (c)  e = Identity (d)
        y = Add (e, a)  z = Neg (e)
    }"""
    model = load_onnx(tmp_path, f"g {text}")
    prepared, steps = prepare(model, DROP_STEPS)
    assert [(step.step, step.target, step.detail.split()[-1]) for step in steps] == [
        ("drop-identity", "a", "x:0"),
        ("drop-identity", "c", "b:0"),
        ("drop-identity", "e", "d:0"),
        ("drop-dropout", "b", "x:0"),
    ]
    message = onnx_format.emit(prepared)
    assert [(node.op_type, list(node.input)) for node in message.graph.node] == [
        ("Relu", ["x"]),
        ("Add", ["d", "x"]),
        ("Neg", ["d"]),
    ]
    x = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    for first, second in zip(
        run_onnx(message, {"x": x}, check=True), run_onnx(model.source.message, {"x": x}, check=True), strict=True
    ):
        assert first.tobytes() == second.tobytes()
    assert find_skipped_steps(prepared, DROP_STEPS) == ()


def test_bodies_read_on(tmp_path):
    """A body that read an Identity outside of it reads what that read; its own are taken out but for its outputs'."""
    text = """(float[3] x, bool b) => (float[3] y) {
        a = Identity (x)
        y = If (b) <
            then_branch = t () => (float[3] p) { c = Identity (a)  d = Relu (c)  p = Identity (d) },
            else_branch = e () => (float[3] q) { q = Neg (a) }
        >
    }"""
    model = load_onnx(tmp_path, f"g {text}")
    prepared, steps = prepare(model, DROP_STEPS)
    assert [step.target for step in steps] == ["a", "y/then_branch/c"]
    assert steps[0].undo["rewired"] == [
        {"graph": "y/then_branch", "op": "c", "slot": 0, "read": {"op": "a", "port": 0}},
        {"graph": "y/else_branch", "op": "q", "slot": 0, "read": {"op": "a", "port": 0}},
    ]
    message = onnx_format.emit(prepared)
    x = np.array([-1, 0, 2], np.float32)
    for flag in (True, False):
        assert np.array_equal(
            run_onnx(message, {"x": x, "b": np.array(flag)}, check=True),
            run_onnx(model.source.message, {"x": x, "b": np.array(flag)}, check=True),
        )
    (skipped,) = find_skipped_steps(prepared, DROP_STEPS)
    assert str(skipped.tensor) == "y/then_branch/p:0"
    assert "graph output" in skipped.reason


@pytest.mark.parametrize(
    ("text", "opset", "step", "reason"),
    [
        ("(float[3] x) => (float[3] y) { y = Identity (x) }", 13, "drop-identity", "graph output"),
        (
            "(float[3] x) => (float[3] y, bool[3] z) { a, m = Dropout (x)  y = Neg (a)  z = Not (m) }",
            13,
            "drop-dropout",
            "mask",
        ),
        (
            "(float[3] x, bool t) => (float[3] y) { a = Dropout (x, , t)  y = Neg (a) }",
            13,
            "drop-dropout",
            "training mode; export",
        ),
        (
            "(float[3] x) => (float[3] y) <bool t = {1}> { a = Dropout (x, , t)  y = Neg (a) }",
            13,
            "drop-dropout",
            "training mode",
        ),
        (
            "(float[3] x) => (float[3] y) { a = Dropout (x)  y = Neg (a) }",
            6,
            "drop-dropout",
            "training mode",
        ),
    ],
)
def test_forwarding_ops_that_stay(tmp_path, text, opset, step, reason):
    """Ops that name an output, have a mask that is read, or train stay, and the plan has the reason."""
    model = load_onnx(tmp_path, f"g {text}", opset=opset)
    assert prepare(model, DROP_STEPS) == (model, ())
    (skipped,) = find_skipped_steps(model, DROP_STEPS)
    assert skipped.step == step
    assert reason in skipped.reason


@pytest.mark.parametrize(
    ("node", "opset"),
    [
        ("Dropout <is_test = 1> (x)", 6),
        ("Dropout (x)", 7),
        ("Dropout <ratio = 0.5> (x)", 10),
        ("Dropout (x, r, f)", 13),
    ],
)
def test_dropouts_that_do_not_train(tmp_path, node, opset):
    """Of each opset: by an attribute, always, or where a constant says so."""
    text = f"(float[3] x) => (float[3] y) <float r = {{0.5}}, bool f = {{0}}> {{ a = {node}  y = Neg (a) }}"
    model = load_onnx(tmp_path, f"g {text}", opset=opset)
    _, (step,) = prepare(model, DROP_STEPS)
    assert (step.step, step.target) == ("drop-dropout", "a")


def test_a_plan_names_them_and_a_file_before_leaves_them(tmp_path):
    """The plan counts and names what was dropped; a rule file before the others takes the step out."""
    text = """(float[2,16] x) => (float[2,8] y) {
        w = Constant <value = float[16,8] {VALUES}> ()
        a = Identity (x)  b = Identity (a)  m = MatMul (b, w)  y = Relu (m)
    }""".replace("VALUES", ", ".join(str(k / 64) for k in range(128)))
    load_onnx(tmp_path, f"g {text}")
    rules = ["prepare = ['drop-identity']\n", "weight_only"]
    steps = gq.plan(tmp_path / "model.onnx", rules=rules).steps
    assert [(step.step, step.target) for step in steps] == [("drop-identity", "a"), ("drop-identity", "b")]
    assert "fusions" in steps[0].why
    assert gq.plan(tmp_path / "model.onnx", rules=["prepare = ['not drop-identity']\n", *rules]).steps == ()


def test_statistics_of_the_source_serve_the_prepared_model(tmp_path):
    """Statistics that were observed with Identity and Dropout in place are used without these ops."""
    text = """(float[2,16] x) => (float[2,8] y) <float[16,8] w = {VALUES}> {
        a = Identity (x)  b = Dropout (a)  r = Relu (b)  c = Identity (r)  m = MatMul (c, w)  y = Relu (m)
    }""".replace("VALUES", ", ".join(str(k / 64) for k in range(128)))
    load_onnx(tmp_path, f"g {text}")
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32))
    path, data = tmp_path / "model.onnx", str(tmp_path / "data.npz")
    stats = gq.calibrate(path, data=data, everything=True)
    rules = ["prepare = ['drop-identity', 'drop-dropout']\n", "onnxruntime"]
    observed = gq.insert(path, rules=rules, data=data, validate=False)
    with_stats = gq.insert(path, rules=rules, stats=stats)
    assert {step.target for step in with_stats.plan.steps} == {"a", "b", "c"}
    assert [pair.params.scale.tolist() for pair in with_stats.inserted] == [
        pair.params.scale.tolist() for pair in observed.inserted
    ]


LOOP = """(float[1, 4] x, int64 n, bool t) => (float[1, 4] y, float[4, 4] last, float[k, 4, 4] steps) {{
    y, final, steps = Loop (n, t, x, w) <body = b (int64 i, bool c, float[1, 4] h, float[4, 4] v)
        => (bool d, float[1, 4] g, float[4, 4] {returned}, float[4, 4] s) {{
            d = Identity (c)  m = MatMul (h, v)  g = Tanh (m)  s = Identity (v)  {more}
        }}>
    last = Neg (final)
}}"""
"""A recurrent cell whose weight is an argument of the loop's body, which also returns it in each iteration."""


@pytest.mark.parametrize(("returned", "more", "count"), [("v", "", 1), ("u", "u = Neg (v)", 0)])
def test_loops_read_weights_from_outside(tmp_path, returned, more, count):
    """A body reads a weight that it returns unchanged from outside, and the loop passes on a zero."""
    weight = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    model = load_onnx(tmp_path, f"g {LOOP.format(returned=returned, more=more)}", {"w": weight})
    prepared, steps = prepare(model, DROP_STEPS)
    assert [step.step for step in steps if step.detail == "its body reads w:0"] == ["drop-identity"] * count
    message = onnx_format.emit(prepared)
    assert [tuple(tensor.dims) for tensor in message.graph.initializer] == [(4, 4), *[()] * count]
    feeds = {"x": np.ones((1, 4), np.float32), "n": np.array(3), "t": np.array(True)}
    outputs = run_onnx(message, feeds, check=True), run_onnx(model.source.message, feeds, check=True)
    for first, second in zip(*outputs, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-6)  # a product with a constant sums in another order


@pytest.mark.parametrize(
    ("outer", "body", "outputs"),
    [
        ("h = MatMul(x, w) k = Identity(x)", ("x", "{ co = Identity(c) p = MatMul(x, v) o = Add(p, k) }"), "y"),
        ("h = MatMul(x, w) k = Identity(v)", ("v", "{ co = Identity(c) o = MatMul(v, k) }"), "y"),
        ("h = MatMul(x, w) k = Identity(h)", ("h", "{ co = Identity(c) p = MatMul(h, v) o = Add(p, k) }"), "y"),
        ("h = MatMul(x, w) k = Identity(h)", ("h", "{ co = Identity(c) p = MatMul(h, v) o = Add(p, k) }"), "y, h"),
        (
            "h = MatMul(x, w) k = Identity(h)",
            (
                "h",
                """{ co = Identity(c) p = Loop(n, t, h) <body = b2 (int64 j, bool d, float[1, 4] h) =>
                (bool do, float[1, 4] q) { do = Identity(d) r = MatMul(h, v) q = Add(r, k) }> o = Tanh(p) }""",
            ),
            "y",
        ),
    ],
    ids=["input", "weight", "value", "output", "nested"],
)  # fmt: skip
def test_arguments_of_a_body_do_not_hide_outer_tensors(tmp_path, outer, body, outputs):
    """Bodies can read inputs, weights, values and outputs that have the name of an argument; strip restores them."""
    rng = np.random.default_rng(0)
    declared = ", ".join(f"float[1, 4] {name}" for name in outputs.split(", "))
    head = f"<body = b (int64 i, bool c, float[1, 4] {body[0]}) => (bool co, float[1, 4] o)"
    text = f"g (float[1, 4] x, int64 n, bool t) => ({declared}) {{ {outer} y = Loop(n, t, h) {head} {body[1]}> }}"
    model = load_onnx(tmp_path, text, {name: rng.normal(size=(4, 4)).astype(np.float32) / 2 for name in "wv"})
    source = tmp_path / "model.onnx"
    prepared = onnx_format.emit(prepare(model, DROP_STEPS)[0])
    feeds = {"x": np.ones((1, 4), np.float32), "n": np.array(3), "t": np.array(True)}
    for first, second in zip(run_onnx(prepared, feeds, check=True), run_onnx(model.source.message, feeds), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5)
    samples = {"x": rng.normal(size=(8, 1, 4)).astype(np.float32), "n": np.full(8, 3), "t": np.full(8, True)}
    result = gq.insert(model, data=samples, min_sqnr="none")
    assert prove_stripped(gq.strip(result.save(tmp_path / "quantized.onnx")), source).holds


def test_a_hiding_argument_that_the_body_returns(tmp_path):
    """Its output gets the new name of the argument."""
    rng = np.random.default_rng(0)
    text = """g (float[1, 4] x, int64 n, bool t) => (float[1, 4] y, float[1, 4] z) {
        h = MatMul(x, w) k = Identity(h)
        y, z = Loop(n, t, h, x) <body = b (int64 i, bool c, float[1, 4] q, float[1, 4] h) =>
            (bool c, float[1, 4] o, float[1, 4] h) { p = MatMul(q, v) r = Add(p, k) o = Add(r, h) }>
    }"""
    model = load_onnx(tmp_path, text, {name: rng.normal(size=(4, 4)).astype(np.float32) / 2 for name in "wv"})
    feeds = {"x": np.ones((1, 4), np.float32), "n": np.array(3), "t": np.array(True)}
    prepared = onnx_format.emit(prepare(model, DROP_STEPS)[0])
    for first, second in zip(run_onnx(prepared, feeds), run_onnx(model.source.message, feeds), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5)
    samples = {"x": rng.normal(size=(8, 1, 4)).astype(np.float32), "n": np.full(8, 3), "t": np.full(8, True)}
    result = gq.insert(model, data=samples, min_sqnr="none")
    assert prove_stripped(gq.strip(result.save(tmp_path / "quantized.onnx")), tmp_path / "model.onnx").holds


def test_arguments_of_a_body_do_not_hide_weights(tmp_path):
    """The argument that a weight replaces gets another name if it has the weight's."""
    weight = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    text = LOOP.format(returned="w", more="").replace("4] v", "4] w").replace("(h, v)", "(h, w)").replace("(v)", "(w)")
    model = load_onnx(tmp_path, f"g {text}", {"w": weight})
    message = onnx_format.emit(prepare(model, DROP_STEPS)[0])
    (loop,) = (node for node in message.graph.node if node.op_type == "Loop")
    assert "w/inner" in {info.name for info in loop.attribute[0].g.input}
    feeds = {"x": np.ones((1, 4), np.float32), "n": np.array(3), "t": np.array(True)}
    for first, second in zip(run_onnx(message, feeds, check=True), run_onnx(model.source.message, feeds), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-6)
    feeds["x"] = np.random.default_rng(1).normal(size=(8, 1, 4)).astype(np.float32)
    result = gq.insert(model, data=feeds, float_weights=True, min_sqnr="none")
    assert gq.strip(result.save(tmp_path / "quantized.onnx")).exact


def test_loops_without_a_body_stay(tmp_path):
    """A Loop whose body is missing is left to the runtime, which says what is wrong."""
    text = "g (float[1, 4] x, int64 n, bool t) => (float[1, 4] y) { y = Loop (n, t, x) }"
    assert prepare(load_onnx(tmp_path, text, {}), DROP_STEPS)[1] == ()


def test_weights_of_loops_are_quantized_once(tmp_path):
    """The int8 weight of a loop's body is a constant with a scale per channel, and `strip` restores the source."""
    weight = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    model = load_onnx(tmp_path, f"g {LOOP.format(returned='v', more='')}", {"w": weight})
    samples = {"x": np.random.default_rng(1).normal(size=(8, 1, 4)), "n": np.array(3), "t": np.array(True)}
    samples["x"] = samples["x"].astype(np.float32)
    result = gq.insert(model, data=samples, float_weights=True, min_sqnr="none")
    assert [site.scheme.per for site in result.plan.sites if site.parameter] == ["channel"]
    assert gq.strip(result.save(tmp_path / "quantized.onnx")).exact
