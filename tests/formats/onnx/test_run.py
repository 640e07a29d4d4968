"""Running models, and watching tensors anywhere in them, against values computed by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from graphquant.errors import ModelError
from graphquant.formats import InputSpec
from graphquant.formats import onnx as format_
from graphquant.ir import TensorRef, Use

if TYPE_CHECKING:
    from graphquant.ir import Model

Array = np.ndarray[Any, Any]

HEAD = '<ir_version: 8, opset_import: ["" : 17]> '
X = np.array([-3, 4], np.float32)


def observed(model: Model, *tensors: tuple[str, str], **feeds: Any) -> list[list[list[float]]]:
    """Return for each tensor (graph, op) the values it took, for one feed."""
    refs = [TensorRef(*tensor) for tensor in tensors]
    found = list(format_.runner(model).observe(refs, [{name: np.asarray(value) for name, value in feeds.items()}]))
    assert len(found) == 1
    return [[value.tolist() for value in found[0][ref]] for ref in refs]


def test_run(model_of: Any) -> None:
    """A runner lists the inputs that must be fed, and gives the outputs by name; defaults need no feed."""
    model = model_of(
        HEAD
        + """g (float[N] x, float[2] w) => (float[N] y, float[N] z) <float[2] w = {1, 2}> {
        y = Add(x, w)
        z = Neg(x)
    }"""
    )
    runner = format_.runner(model)
    assert runner.inputs == [InputSpec(name="x", dtype="float32", shape=(None,))]
    assert runner.outputs == ["y", "z"]
    results = runner.run({"x": X})
    assert {name: value.tolist() for name, value in results.items()} == {"y": [-2, 6], "z": [3, -4]}
    assert runner.run({"x": X, "w": X})["y"].tolist() == [-6, 8]


def test_failures_are_model_errors(model_of: Any) -> None:
    """A model that onnxruntime refuses, or a feed that does not fit, is an error with its first line and the shapes."""
    with pytest.raises(ModelError, match=r"onnxruntime cannot take the model: .*Nonsense"):
        format_.runner(model_of(HEAD + "g (float[2] x) => (float[2] y) { y = Nonsense(x) }")).run({"x": X})
    runner = format_.runner(model_of(HEAD + "g (float[2] x) => (float[2] y) { y = Neg(x) }"))
    with pytest.raises(ModelError, match=r"onnxruntime failed on the inputs x float32\[3\]: "):
        runner.run({"x": np.zeros(3, np.float32)})
    with pytest.raises(ModelError, match=r"onnxruntime failed on the inputs none: "):
        runner.run({})


def test_observe_main_graph(model_of: Any, identity_at: Any) -> None:
    """Inputs, constants, inner values and outputs are observed, in an edited model as well, one entry a feed."""
    model = model_of(HEAD + "g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { a = Add(x, w)  y = Neg(a) }")
    identity_at(model, TensorRef("", "y"), [Use("", "@y", 0)])
    names = [("", "x"), ("", "w"), ("", "a"), ("", "y"), ("", "y/quant")]
    assert observed(model, *names, x=X) == [[[-3, 4]], [[1, 2]], [[-2, 6]], [[2, -6]], [[2, -6]]]
    runner = format_.runner(model)
    found = list(runner.observe([TensorRef("", "a")], [{"x": X}, {"x": -X}]))
    assert [feed[TensorRef("", "a")][0].tolist() for feed in found] == [[-2, 6], [4, -2]]
    assert next(runner.observe([TensorRef("", "w")], [{"x": X}]))[TensorRef("", "w")][0].tolist() == [1, 2]


NESTED = (
    HEAD
    + """g (float[2] x, bool c, bool d) => (float[2] y) <float[2] w = {1, 2}> {
    y = If(c) <
        then_branch = t () => (float[2] p) {
            a = Add(x, w)
            p = If(d) <then_branch = u () => (float[2] s) { s = Mul(a, w) },
                else_branch = v () => (float[2] r) { r = Abs(a) }>
        },
        else_branch = e () => (float[2] q) { q = Neg(x) }
    >
}"""
)


@pytest.mark.parametrize(
    ("c", "d", "expected"),
    [
        (True, True, [[[-2, 6]], [[-2, 12]], [], []]),
        (True, False, [[[-2, 6]], [], [[2, 6]], []]),
        (False, True, [[], [], [], [[3, -4]]]),
    ],
)
def test_observe_branches(c: bool, d: bool, expected: list[Any], model_of: Any) -> None:
    """Tensors of branches are seen when their branch is taken, in nested ones too, and not otherwise."""
    names = [
        ("y/then_branch", "a"),
        ("y/then_branch/p/then_branch", "s"),
        ("y/then_branch/p/else_branch", "r"),
        ("y/else_branch", "q"),
    ]
    assert observed(model_of(NESTED), *names, x=X, c=c, d=d) == expected


LOOP = (
    HEAD
    + """g (int64 n, bool c, float[1] x) => (float[N] y) {
    y, all = Loop(n, c, x) <body = b (int64 i, bool k, float[N] s) => (bool k2, float[M] s2, float scan) {
        k2 = Identity(k)
        d = Add(s, s)
        s2 = Concat <axis = 0> (s, d)
        zero = Constant <value = int64 {0}> ()
        even = Equal(zero, i)
        p = If(even) <then_branch = u () => (float[L] f) { f = Neg(d) },
            else_branch = v () => (float[L] h) { h = Abs(d) }>
        scan = ReduceMax <keepdims = 0> (p)
    }>
}"""
)


def test_observe_loop(model_of: Any) -> None:
    """Tensors in a loop are seen once an iteration, also if their shape changes; those in its branches when reached."""
    names = [("y/body", "s"), ("y/body", "d"), ("y/body/p/then_branch", "f"), ("y/body/p/else_branch", "h"), ("", "y")]
    values = observed(model_of(LOOP), *names, n=np.int64(3), c=True, x=np.array([1], np.float32))
    assert values == [
        [[1], [1, 2], [1, 2, 2, 4]],
        [[2], [2, 4], [2, 4, 4, 8]],
        [[-2]],
        [[2, 4], [2, 4, 4, 8]],
        [[1, 2, 2, 4, 2, 4, 4, 8]],
    ]
    nothing = observed(model_of(LOOP), *names[:4], n=np.int64(0), c=True, x=np.array([1], np.float32))
    assert nothing == [[], [], [], []]


def test_observe_loops_in_loops_and_branches(model_of: Any) -> None:
    """A loop in a branch in a loop gives the values of all its iterations in order, and its scan outputs stay right."""
    model = model_of(
        HEAD
        + """g (float[1] x) => (float[1] y) <int64 n = {2}, bool yes = {1}, int64 one = {1}> {
        y = Loop(n, yes, x) <body = b (int64 i, bool k, float[1] s) => (bool k2, float[1] s2) {
            k2 = Identity(k)
            first = Less(i, one)
            s2 = If(first) <
                then_branch = u () => (float[1] t) {
                    t, rows = Loop(n, yes, s) <body = w (int64 j, bool m, float[1] a)
                        => (bool m2, float[1] a2, float[1] row) {
                        m2 = Identity(m)
                        a2 = Add(a, a)
                        row = Neg(a2)
                    }>
                },
                else_branch = v () => (float[1] e) { e = Abs(s) }
            >
        }>
    }"""
    )
    names = [("y/body/s2/then_branch/t/body", "row"), ("y/body/s2/else_branch", "e"), ("y/body", "s2"), ("", "y")]
    values = observed(model, *names, x=np.array([1], np.float32))
    assert values == [[[-2], [-4]], [[4]], [[4], [4]], [[4]]]


def test_observe_scan(model_of: Any) -> None:
    """Tensors in a scan are seen once an iteration; its axes and directions of outputs grow with it."""
    model = model_of(
        HEAD
        + """g (float[1] x, float[3,1] rows) => (float[1] y, float[1,3] all) {
        y, all = Scan <num_scan_inputs = 1, scan_output_axes = [1],
            body = b (float[1] s, float[1] r) => (float[1] s2, float[1] o) { s2 = Add(s, r)  o = Neg(s2) }> (x, rows)
    }"""
    )
    values = observed(
        model,
        ("y/body", "r"),
        ("y/body", "s2"),
        x=np.array([1], np.float32),
        rows=np.array([[1], [2], [3]], np.float32),
    )
    assert values == [[[1], [2], [3]], [[2], [4], [7]]]


def test_unwatchable_tensors_are_named(model_of: Any) -> None:
    """A tensor in a function, or in a loop of an opset without sequences, is an error that names it and the way out."""
    function = model_of("""<ir_version: 8, opset_import: ["" : 17, "f" : 1]>
    g (float[2] x) => (float[2] y) { y = f.fn(x) }
    <domain: "f", opset_import: ["" : 17]> fn (a) => (b) { b = Neg(a) }""")
    with pytest.raises(ModelError, match=r"f:fn/b:0 cannot be watched: .*Inline"):
        observed(function, ("f:fn", "b"), x=X)
    with pytest.raises(ModelError, match=r"y/body/d:0 cannot be watched: it is inside a Loop of opset 10"):
        observed(model_of(LOOP.replace("17", "10")), ("y/body", "d"))
