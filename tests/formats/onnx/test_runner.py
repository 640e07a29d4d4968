"""Running models against values computed by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from support.onnx_models import load_onnx

import graphquant as gq
from graphquant import formats
from graphquant.errors import ModelError
from graphquant.formats import InputSpec
from graphquant.formats import onnx as format_
from graphquant.formats.onnx import runner as onnx_runner
from graphquant.formats.onnx import session
from graphquant.formats.onnx.tensors import first_line
from graphquant.ir import TensorRef

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, Any]

HEAD = '<ir_version: 8, opset_import: ["" : 17]> '
X = np.array([-3, 4], np.float32)


def test_run(load_text: Any) -> None:
    """A runner lists the inputs that must be fed, and returns the outputs by name; defaults need no feed."""
    model = load_text(
        HEAD
        + """g (float[N] x, float[2] w) => (float[N] y, float[N] z) <float[2] w = {1, 2}> {
        y = Add(x, w)
        z = Neg(x)
    }"""
    )
    runner = format_.create_runner(model)
    assert runner.inputs == [InputSpec(name="x", dtype="float32", shape=(None,))]
    assert runner.outputs == ["y", "z"]
    results = runner.run({"x": X})
    assert {name: value.tolist() for name, value in results.items()} == {"y": [-2, 6], "z": [3, -4]}
    assert runner.run({"x": X, "w": X})["y"].tolist() == [-6, 8]


def test_failures_are_model_errors(load_text: Any) -> None:
    """A model that onnxruntime rejects, or an unsuitable feed, is an error with its first line and the shapes."""
    with pytest.raises(ModelError, match=r"onnxruntime rejects .*Nonsense"):
        format_.create_runner(load_text(HEAD + "g (float[2] x) => (float[2] y) { y = Nonsense(x) }")).run({"x": X})
    runner = format_.create_runner(load_text(HEAD + "g (float[2] x) => (float[2] y) { y = Neg(x) }"))
    with pytest.raises(ModelError, match=r"onnxruntime failed .* x float32\[3\]: "):
        runner.run({"x": np.zeros(3, np.float32)})
    with pytest.raises(ModelError, match=r"onnxruntime failed .* none: "):
        runner.run({})


@pytest.mark.parametrize(
    ("inputs", "nodes", "shapes"),
    [
        ("float[a, b] x, float[c, d] z", "Add(x, z)", [(2, 3), (4, 5)]),
        ("float[a, b] x, float[c, d] z", "MatMul(x, z)", [(2, 3), (4, 5)]),
        ("float[a, b, c] x, float[d] z, uint8[e] o", "QuantizeLinear<axis = 5>(x, z, o)", [(2, 3, 4), (3,), (3,)]),
        ("float[a] x, int64[b] z", "Reshape(x, z)", [(3,), (7,)]),
        ("float[a, b] x, int64[c] z", "Unsqueeze(x, z)", [(1, 3), (9,)]),
        ("float[a, b] x, int64[c] z", "Pad(x, z)", [(1, 3), (1,)]),
        ("float[a] x", "Einsum<equation = 'ij,jk->ik'>(x)", [(3,)]),
    ],
)
def test_errors_name_no_source_code(load_text: Any, inputs: str, nodes: str, shapes: list[tuple[int, ...]]) -> None:
    """Errors of onnxruntime have no status code, C++ signature or path of a source file."""
    nodes = nodes.replace("'", '"')
    output = "uint8" if "Quantize" in nodes else "float"
    runner = format_.create_runner(load_text(HEAD + f"g ({inputs}) => ({output} y) {{ y = {nodes} }}"))
    with pytest.raises(ModelError) as failure:
        runner.run({spec.name: np.ones(shape, spec.dtype) for spec, shape in zip(runner.inputs, shapes, strict=True)})
    assert re.search(r"ONNXRuntimeError|\.(h|cc):\d|::|\w\(| was false", str(failure.value)) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[ONNXRuntimeError] : 1 : FAIL : /src/m.cc:256 ort::Model::Model(P&&, const L&) Bad: 9.\n", "Bad: 9"),
        ("No:/x/y.h:31 int64_t ort::F(int64_t, int64_t) Ok(axis, rank) was false. axis 5 (of 3)", "No:axis 5 (of 3)"),
        ("/x/y.h:3 void ort::P::C(T&, s<const long>) [with T = K; V = a::B<long, 10>] n was false.", "n was false"),
        ("/x/y.cc:3 ort::F(const S&)::<lambda(const std::function<void(int)>&)> const x was false. No", "No"),
        ("/x/y.cc:3 bool ort::X::operator()(const T&) const Wrong", "Wrong"),
        (r"D:\a\_work\1\s\core\model.cc:181 onnxruntime::Model::Model Unsupported version", "Unsupported version"),
        ("at matmul.h:59 Compute Sizes (2) differ", "at Sizes (2) differ"),
        ("/g/onnx/BaseConverter.h:70: adapter_lookup: Assertion `false` failed: No adapter (y)", "No adapter (y)"),
        ("Node:a.h:b Op(Concat) has data.cc:12", "Node:a.h:b Op(Concat) has data.cc:12"),
        ("", "ValueError"),
    ],
)
def test_first_line(text: str, expected: str) -> None:
    """The first line of an error has no text about C++ code, for messages of Linux, Windows and onnx."""
    assert first_line(ValueError(text)) == expected


def test_first_line_takes_linear_time() -> None:
    """Names of millions of characters, which a model may have, are searched at their start only."""
    call = "/a.h:1 f()"
    for text in ("a:", "/a.h:1 ", "/a.h:1 f((", "()", "x was false.", "()>&>&"):
        assert len(first_line(ValueError(call + text * 10**6))) > 10**6
        assert len(first_line(ValueError(text * 10**6))) > 10**6


def test_ancestors_only(load_text: Any) -> None:
    """Ops that no observed value depends on do not run: here one fails. A value that a body captures is computed."""
    model = load_text(
        HEAD
        + """g (float[N] x, bool c) => (float[K] y, float[N] z) {
            four = Constant<value = int64[1] {4}>() y = Reshape(x, four) b = Neg(x)
            a = If(c)<then_branch = t () => (float[N] u) { u = Neg(b) },
                      else_branch = e () => (float[N] v) { v = Abs(b) }>
            z = Neg(a)
        }"""
    )
    tensor = next(TensorRef("", op.name) for op in model.main.ops() if op.type == "If")
    feed = {"x": X, "c": np.array(False)}
    with pytest.raises(ModelError):
        list(format_.create_runner(model).observe([tensor], [feed]))
    (values,) = format_.create_runner(model).observe([tensor], [feed], ancestors_only=True)
    assert values[tensor][0].tolist() == np.abs(X).tolist()


def test_ancestors_only_with_unused_weights(tmp_path: Path) -> None:
    """A large weight that callers may override, and that no observed value depends on, needs no value."""
    weight = np.ones((64, 64), np.float32)
    text = "g (float[2,64] x, float[64,64] w) => (float[2,64] y) { a = Neg(x) y = MatMul(a, w) }"
    model = load_onnx(tmp_path, text, {"w": weight})
    feed = {"x": np.ones((2, 64), np.float32)}
    (values,) = format_.create_runner(model).observe([TensorRef("", "a")], [feed], ancestors_only=True)
    assert (values[TensorRef("", "a")][0] == -1).all()


def test_shared_runners(load_text: Any) -> None:
    """A shared runner is that of its model until the context ends, or until another model takes its role."""
    first, second = (load_text(HEAD + "g (float[N] x) => (float[N] y) { y = Neg(x) }") for _ in range(2))
    with formats.shared_runners():
        runner = formats.shared_runner(first, "prepared")
        assert formats.create_runner(first) is runner
        assert formats.create_runner(replace(first, provenance={"a": "b"})) is runner
        assert formats.create_runner(second) is not runner
        formats.shared_runner(second, "prepared")
        assert formats.create_runner(first) is not runner
        formats.release_runners("prepared")
        assert formats.create_runner(second) is not formats.create_runner(second)
    assert formats.shared_runner(first, "source") is not formats.create_runner(first)


def test_outputs_of_an_observing_session(load_text: Any) -> None:
    """Outputs come from the session that observes, if they are tensors."""
    model = load_text(HEAD + "g (float[N] x) => (float[N] y) { a = Neg(x) y = Neg(a) }")
    runner = format_.create_runner(model)
    tensor = next(TensorRef("", op.name) for op in model.main.ops() if op.type == "Neg")
    list(runner.observe([tensor], [{"x": X}]))
    (outputs,) = formats.run_outputs(runner, [{"x": X}])
    assert outputs["y"].tolist() == X.tolist()
    assert runner._session is None


def test_sessions_that_observe(load_text: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls for the same tensors share a session; concurrent runs of few tensors have further ones."""
    model = load_text(HEAD + "g (float[N] x) => (float[N] y) { a = Neg(x) y = Neg(a) }")
    tensors = [TensorRef("", op.name) for op in model.main.ops() if op.type == "Neg"]
    sessions: list[Any] = []
    create = session.create_session

    def count_session(*args: Any, **options: Any) -> Any:
        sessions.append(create(*args, **options))
        return sessions[-1]

    monkeypatch.setattr(session, "create_session", count_session)
    for limit, expected in ((2, [1, 1, 3, 3]), (1, [1, 1, 1, 1])):
        monkeypatch.setattr(onnx_runner, "MAX_COPIED_TENSORS", limit)
        sessions.clear()
        runner = format_.create_runner(model)
        counts = []
        all_options: tuple[dict[str, Any], ...] = ({}, {}, {"max_in_flight": 3, "on_result": len}, {})
        for options in all_options:
            values = list(runner.observe(tensors, [{"x": X}] * 4, **options))
            assert [value[tensors[1]][0].tolist() for value in values] == [[-3, 4]] * 4
            counts.append(len(sessions))
        assert counts == expected


def test_large_weights_are_passed_to_the_session_by_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights are passed to onnxruntime as arrays, and it computes the same."""
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal((32, 32)).astype(np.float32) for name in ("w", "default", "given", "unread", "a")
    }
    tensors = {name: numpy_helper.from_array(value, name) for name, value in arrays.items()}
    tensors["w"] = helper.make_tensor("w", 1, [32, 32], arrays["w"].ravel())  # as numbers, not as bytes
    infos = {
        name: helper.make_tensor_value_info(name, 1, [32, 32]) for name in ("x", "default", "given", "y", "b", "o")
    }
    branch = [helper.make_node("MatMul", ["p", "a"], ["b"]), helper.make_node("MatMul", ["p", "w"], ["o"])]
    bodies = [
        helper.make_graph([node], name, [], [infos[name]], [tensors["a"]] if name == "b" else [])
        for node, name in zip(branch, "bo", strict=True)
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "default"], ["p"]),
        helper.make_node("If", ["c"], ["y"], then_branch=bodies[0], else_branch=bodies[1]),
    ]
    inputs = [infos["x"], infos["default"], helper.make_tensor_value_info("c", 9, [])]
    graph = helper.make_graph(nodes, "g", inputs, [infos["y"], infos["given"]], list(tensors.values())[:4])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    external_names: list[str] = []
    create_session = session.create_session
    monkeypatch.setattr(
        session,
        "create_session",
        lambda data, *args, **options: external_names.extend(args[2]) or create_session(data, *args, **options),
    )
    runner = format_.create_runner(gq.load(path))
    reference_session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for branch_taken in (True, False):
        feed = {"x": arrays["a"], "c": np.array(branch_taken)}
        for extra_feed in ({}, {"default": arrays["unread"]}):
            results, expected = runner.run({**feed, **extra_feed}), reference_session.run(None, {**feed, **extra_feed})
            np.testing.assert_array_equal(results["y"], expected[0])
            np.testing.assert_array_equal(results["given"], arrays["given"])
    assert external_names == ["w", "default", "given"]


@pytest.mark.parametrize(("limit", "freed"), [(0, True), (1 << 24, False)])
def test_large_sessions_are_freed(load_text: Any, monkeypatch: pytest.MonkeyPatch, limit: int, freed: bool) -> None:
    """The session that observes a large model is freed alone, and created again when tensors are observed."""
    monkeypatch.setattr(onnx_runner, "SESSION_PER_THREAD_BYTES", limit)
    runner = format_.create_runner(load_text(HEAD + "g (float[2] x) => (float[2] y) { h = Neg(x) y = Abs(h) }"))
    tensor = TensorRef("", "h")
    expected = [values[tensor][0].tolist() for values in runner.observe([tensor], [{"x": X}])]
    runner.run({"x": X})
    before = runner._full_watch, runner._session
    runner.free_session(observing=True)
    assert (runner._full_watch is None, runner._session is before[1]) == (freed, True)
    assert [values[tensor][0].tolist() for values in runner.observe([tensor], [{"x": X}])] == expected
    runner.free_session()
    assert (runner._session is None, runner._full_watch is None) == (freed, False)
    runner.free_session(only_large=False)
    assert (runner._session is None, runner._full_watch is None) == (True, False)


def test_elements_of_one_sample_are_counted_once(load_text: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that only a run tells are kept for the last sample, and counted again for another one."""
    runner = format_.create_runner(load_text(HEAD + "g (float[n] x) => (float[n] y) { h = Neg(x) y = Abs(h) }"))
    created: list[object] = []
    create = runner._create_watch
    monkeypatch.setattr(runner, "_create_watch", lambda *arguments: created.append(arguments) or create(*arguments))
    tensors = [TensorRef("", "h"), TensorRef("", "y")]
    assert runner.element_counts(tensors, {"x": X}) == dict.fromkeys(tensors, X.size)
    assert runner.element_counts(tensors[:1], {"x": X.copy()}) == {tensors[0]: X.size}
    assert len(created) == 1
    assert runner.element_counts(tensors, {"x": np.concatenate([X, X])}) == dict.fromkeys(tensors, 2 * X.size)
    assert len(created) == 2
