"""Observed tensors anywhere in a model, and their sizes, against values computed by hand."""

from __future__ import annotations

import gc
import re
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from graphquant.errors import ModelError
from graphquant.formats import onnx as format_
from graphquant.ir import TensorRef, Use

if TYPE_CHECKING:
    from graphquant.ir import Model

Array = np.ndarray[Any, Any]

HEAD = '<ir_version: 8, opset_import: ["" : 17]> '
X = np.array([-3, 4], np.float32)


def observe_values(model: Model, *tensors: tuple[str, str], **feeds: Any) -> list[list[list[float]]]:
    """Return for each tensor (graph, op) the values it took, for one feed.

    The sizes must be those of the values, and tensors observed one by one must have the same bits.
    """
    refs = [TensorRef(*tensor) for tensor in tensors]
    feed = {name: np.asarray(value) for name, value in feeds.items()}
    runner = format_.create_runner(model)
    assert runner.unobservable(refs) == {}
    (values_by_tensor,) = runner.observe(refs, [feed])
    assert runner.element_counts(refs, feed) == {
        ref: sum(value.size for value in values_by_tensor[ref]) for ref in refs
    }
    for ref in refs if len(refs) > 1 else []:
        (single_values,) = runner.observe(
            [ref], [feed], other_tensors=[other_ref for other_ref in refs if other_ref != ref]
        )
        assert list(single_values) == [ref]
        assert [(value.shape, value.tobytes()) for value in single_values[ref]] == [
            (value.shape, value.tobytes()) for value in values_by_tensor[ref]
        ]
    return [[value.tolist() for value in values_by_tensor[ref]] for ref in refs]


def test_observe_main_graph(load_text: Any, identity_at: Any) -> None:
    """Inputs, constants, inner values and outputs are observed, also in an edited model, once per feed."""
    model = load_text(HEAD + "g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { a = Add(x, w)  y = Neg(a) }")
    identity_at(model, TensorRef("", "y"), [Use("", "@y", 0)])
    names = [("", "x"), ("", "w"), ("", "a"), ("", "y"), ("", "y/quant")]
    assert observe_values(model, *names, x=X) == [[[-3, 4]], [[1, 2]], [[-2, 6]], [[2, -6]], [[2, -6]]]
    runner = format_.create_runner(model)
    observations = list(runner.observe([TensorRef("", "a")], [{"x": X}, {"x": -X}]))
    assert [feed[TensorRef("", "a")][0].tolist() for feed in observations] == [[-2, 6], [4, -2]]
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
def test_observe_branches(c: bool, d: bool, expected: list[Any], load_text: Any) -> None:
    """Tensors of branches, nested ones too, have values only if their branch is taken."""
    names = [
        ("y/then_branch", "a"),
        ("y/then_branch/p/then_branch", "s"),
        ("y/then_branch/p/else_branch", "r"),
        ("y/else_branch", "q"),
    ]
    assert observe_values(load_text(NESTED), *names, x=X, c=c, d=d) == expected


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


def test_observe_loop(load_text: Any) -> None:
    """Tensors in a loop have one value per iteration, even if their shape changes; in branches, when reached."""
    names = [("y/body", "s"), ("y/body", "d"), ("y/body/p/then_branch", "f"), ("y/body/p/else_branch", "h"), ("", "y")]
    values = observe_values(load_text(LOOP), *names, n=np.int64(3), c=True, x=np.array([1], np.float32))
    assert values == [
        [[1], [1, 2], [1, 2, 2, 4]],
        [[2], [2, 4], [2, 4, 4, 8]],
        [[-2]],
        [[2, 4], [2, 4, 4, 8]],
        [[1, 2, 2, 4, 2, 4, 4, 8]],
    ]
    nothing = observe_values(load_text(LOOP), *names[:4], n=np.int64(0), c=True, x=np.array([1], np.float32))
    assert nothing == [[], [], [], []]


def test_observe_loops_in_loops_and_branches(load_text: Any) -> None:
    """A loop in a branch in a loop gives the values of all iterations in order; scan outputs stay correct."""
    model = load_text(
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
    values = observe_values(model, *names, x=np.array([1], np.float32))
    assert values == [[[-2], [-4]], [[4]], [[4], [4]], [[4]]]


def test_observe_scan(load_text: Any) -> None:
    """Tensors in a scan have one value per iteration; the axes and directions of its outputs are extended."""
    model = load_text(
        HEAD
        + """g (float[1] x, float[3,1] rows) => (float[1] y, float[1,3] all) {
        y, all = Scan <num_scan_inputs = 1, scan_output_axes = [1],
            body = b (float[1] s, float[1] r) => (float[1] s2, float[1] o) { s2 = Add(s, r)  o = Neg(s2) }> (x, rows)
    }"""
    )
    values = observe_values(
        model,
        ("y/body", "r"),
        ("y/body", "s2"),
        x=np.array([1], np.float32),
        rows=np.array([[1], [2], [3]], np.float32),
    )
    assert values == [[[1], [2], [3]], [[2], [4], [7]]]


@pytest.mark.parametrize("opset", [8, 9, 11, 12, 13])
def test_observe_loop_of_old_opsets(opset: int, load_text: Any) -> None:
    """Without carried sequences, tensors in loops and branches are observed alike, also of changing shape."""
    text = LOOP.replace("17", str(opset))
    if opset < 11:
        # Equal took no integers yet.
        text = text.replace(
            "even = Equal(zero, i)", "a = Cast<to = 1>(zero) b = Cast<to = 1>(i) odd = Less(a, b) even = Not(odd)"
        )
    names = [("y/body", "s"), ("y/body/p/then_branch", "f"), ("y/body/p/else_branch", "h"), ("", "y")]
    values = observe_values(load_text(text), *names, n=np.int64(3), c=True, x=np.array([1], np.float32))
    assert values == [
        [[1], [1, 2], [1, 2, 2, 4]],
        [[-2]],
        [[2, 4], [2, 4, 4, 8]],
        [[1, 2, 2, 4, 2, 4, 4, 8]],
    ]


SCAN = (
    HEAD
    + """g (float[2,3] x, bool c) => (float[2,3] y) {
    y = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1],
        scan_output_axes = [1], scan_output_directions = [1], body = b (float[2] e) => (float[2] f) {
            m = Mul(e, e)
            f = If (c) <
                then_branch = t () => (float[2] o) { n = Neg(m)  o = Abs(n) },
                else_branch = e () => (float[2] p) { p = Identity(m) }
            >
        }> (x)
}"""
)


@pytest.mark.parametrize("opset", [10, 11, 17])
def test_observe_branch_in_scan(opset: int, load_text: Any) -> None:
    """A branch in a scan is observed in each iteration, and scan outputs keep axis and direction."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    names = [("y/body", "m"), ("y/body/f/then_branch", "n"), ("y/body/f/else_branch", "p"), ("", "y")]
    model = load_text(SCAN.replace("17", str(opset)))
    rows = [[4, 25], [1, 16], [0, 9]]
    assert observe_values(model, *names, x=x, c=True) == [rows, (-np.array(rows)).tolist(), [], [(x * x).tolist()]]
    assert observe_values(model, *names, x=x, c=False) == [rows, [], rows, [(x * x).tolist()]]


def test_observe_loop_in_scan(load_text: Any) -> None:
    """A loop in a scan is observed in each iteration of both; the scan keeps its state."""
    model = load_text(
        HEAD
        + """g (float[1] a, float[3,1] x) => (float[1] s, float[3,1] y) <int64 n = {2}, bool yes = {1}> {
        s, y = Scan <num_scan_inputs = 1, body = b (float[1] t, float[1] e) => (float[1] t2, float[1] f) {
            t2 = Loop(n, yes, t) <body = w (int64 i, bool k, float[1] q) => (bool k2, float[1] q2) {
                k2 = Identity(k)
                q2 = Add(q, e)
            }>
            f = Neg(t2)
        }> (a, x)
    }"""
    )
    names = [("s/body", "t2"), ("s/body/t2/body", "q2"), ("s/body", "e"), ("", "s")]
    x = np.array([[1], [2], [3]], np.float32)
    values = observe_values(model, *names, a=np.zeros(1, np.float32), x=x)
    assert values == [[[2], [6], [12]], [[1], [2], [4], [6], [9], [12]], [[1], [2], [3]], [[12]]]


def test_observe_sequence_map(load_text: Any) -> None:
    """Tensors in the body of SequenceMap have one value per element, whatever its shape."""
    model = load_text(
        HEAD
        + """g (float[2] a, float[3] b) => (float[5] y) {
        s = SequenceConstruct(a, b)
        t = SequenceMap <body = m (float[N] e) => (float[N] f) { f = Neg(e) }> (s)
        y = ConcatFromSequence <axis = 0> (t)
    }"""
    )
    values = observe_values(model, ("t/body", "e"), ("t/body", "f"), a=X, b=np.ones(3, np.float32))
    assert values == [[[-3, 4], [1, 1, 1]], [[3, -4], [-1, -1, -1]]]


def test_observe_functions(load_text: Any) -> None:
    """A tensor in a function has one value per call: from the graph, a branch, or another function."""
    model = load_text(
        """<ir_version: 8, opset_import: ["" : 17, "f" : 1]>
        g (bool c, float[2] x) => (float[2] y, float[2] z) {
            y = f.inner <k = 2.0> (x)
            z = If(c) <then_branch = t () => (float[2] p) { q = f.inner <k = 3.0> (y)  p = f.outer(q) },
                else_branch = e () => (float[2] r) { r = Neg(x) }>
        }
        <domain: "f", opset_import: ["" : 17]> inner <k: float> (a) => (b) {
            w = Constant <value_float: float = @k> ()
            d = Mul(a, w)
            b = Neg(d)
        }
        <domain: "f", opset_import: ["" : 17, "f" : 1]> outer (a) => (b) { b = f.inner <k = 5.0> (a) }
        <domain: "f", opset_import: ["" : 17]> never (a) => (b) { b = Neg(a) }"""
    )
    names = [("f:inner", "d"), ("f:outer", "b"), ("f:never", "b"), ("", "z")]
    values = observe_values(model, *names, c=True, x=X)
    assert values == [[[-6, 8], [18, -24], [-90, 120]], [[90, -120]], [], [[90, -120]]]
    assert observe_values(model, *names, c=False, x=X) == [[[-6, 8]], [], [], [[3, -4]]]


def test_observe_bfloat16(load_text: Any) -> None:
    """bfloat16, which onnxruntime does not return, is observed as float32, in bodies too."""
    model = load_text(
        HEAD
        + """g (bool c, float[2] x) => (float[2] y, float[2] z) {
        h = Cast <to = 16> (x)
        y = Cast <to = 1> (h)
        z = If(c) <then_branch = t () => (float[2] p) { i = Cast <to = 16> (x)  p = Cast <to = 1> (i) },
            else_branch = e () => (float[2] r) { r = Neg(x) }>
    }"""
    )
    assert observe_values(model, ("", "h"), ("z/then_branch", "i"), c=True, x=X) == [[[-3, 4]], [[-3, 4]]]


def test_unobservable_tensors_have_a_reason(load_text: Any) -> None:
    """An unobservable tensor is an error that states the tensor, the reason and advice."""
    # The output of the body has no declared rank, so the position of its new axis is unknown.
    model = load_text(SCAN.replace("(float[2] f)", "(float[] f)"))
    tensor = TensorRef("y/body/f/then_branch", "n")
    runner = format_.create_runner(model)
    reasons = runner.unobservable([tensor, TensorRef("y/body", "m")])
    assert reasons.keys() == {tensor}
    assert re.search(r" y/body/f/then_branch/n:0 .* Scan .* --exclude", reasons[tensor])
    with pytest.raises(ModelError, match="unknown rank"):
        next(runner.observe([tensor], [{}]))


@pytest.mark.parametrize(
    "watched",
    [("c", "r", "y"), ("r", "f"), ("a", "y"), ("c", "a"), ("x", "f"), ("x", "c", "r", "s", "a", "p", "f", "y")],
)
def test_values_do_not_depend_on_other_observed_tensors(watched: tuple[str, ...], load_text: Any) -> None:
    """Tensors divided among calls have the same bits as in one call, although onnxruntime fuses unwatched ops."""
    rng = np.random.default_rng(3)
    model = load_text(
        HEAD
        + """g (float[1,16,9,9] x, float[16,16,3,3] w, float[16] b, float[16,5] v, float[5] d) => (float[1,5] y) {
        c = Conv <pads = [1, 1, 1, 1]> (x, w, b)  r = Relu(c)  s = Conv <pads = [1, 1, 1, 1]> (r, w, b)
        a = Add(s, x)  p = AveragePool <kernel_shape = [3, 3]> (a)
        g = GlobalAveragePool(p)  f = Flatten(g)  m = MatMul(f, v)  y = Add(m, d)
    }"""
    )
    feed = {spec.name: rng.normal(size=spec.shape).astype(np.float32) for spec in format_.create_runner(model).inputs}
    refs = [TensorRef("", name) for name in watched]
    runner = format_.create_runner(model)
    (all_values,) = runner.observe(refs, [feed])
    for group in (*([ref] for ref in refs), refs[::2], refs[1::2]):
        (group_values,) = runner.observe(
            group, [feed], other_tensors=[other_ref for other_ref in refs if other_ref not in group]
        )
        assert list(group_values) == group
        for ref in group:
            np.testing.assert_array_equal(group_values[ref][0], all_values[ref][0])


def test_observed_values_are_freed_between_runs(load_text: Any) -> None:
    """Values that the caller drops are freed before the next run."""
    model = load_text(HEAD + "g (float[2] x) => (float[2] y) { y = Neg(x) }")
    ref = TensorRef("", "y")
    observations = format_.create_runner(model).observe([ref], [{"x": X}, {"x": X}])
    reference = weakref.ref(next(observations)[ref][0])
    gc.collect()
    assert reference() is None
    next(observations)
