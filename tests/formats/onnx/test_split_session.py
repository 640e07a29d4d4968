"""Sessions of the parts of a quantized model give the bits of one session."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import graphquant as gq
from graphquant.analysis import validation
from graphquant.backends import judge_ops
from graphquant.cli import main
from graphquant.errors import ModelError
from graphquant.formats.onnx import create_runner, file_writer, session, split_session
from graphquant.formats.onnx import runner as onnx_runner
from graphquant.formats.onnx.session import SessionError, create_session, require_loadable
from graphquant.formats.onnx.split_session import SplitSession, create_split_session

SAMPLES = Path(__file__).parents[3] / "sample_models"


@pytest.fixture
def few_pairs_per_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split every model with a pair into parts of two nodes or more."""
    monkeypatch.setattr(split_session, "MAX_SESSION_PAIRS", 0)
    monkeypatch.setattr(split_session, "PART_NODES", 2)


def set_limits(patches: pytest.MonkeyPatch, **limits: int) -> None:
    """Set limits of the number of pairs, which sessions and runners share."""
    for name, limit in limits.items():
        for module in (session, onnx_runner):
            patches.setattr(module, name, limit)


def quantized_chain(*, residual: bool = False, dtype: str = "float32") -> onnx.ModelProto:
    """Return six quantized MatMuls with one weight; the outputs are the last dequantized value and an inner one."""
    weight = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
    constants = {"w": np.rint(weight * 127).astype(np.int8), "ws": np.float32(1 / 127), "wz": np.int8(0)}
    constants |= {"s": np.float32(0.03), "z": np.uint8(128)}
    nodes = [helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"])]
    last = "x"
    for k in range(6):
        nodes.append(helper.make_node("QuantizeLinear", [last, "s", "z"], [f"q{k}"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"q{k}", "s", "z"], [f"d{k}"]))
        nodes.append(helper.make_node("MatMul", [f"d{k}", "wd"], [last := f"m{k}"]))
        if residual and k:
            nodes.append(helper.make_node("Add", [last, "d0"], [last := f"a{k}"]))
    nodes.append(helper.make_node("QuantizeLinear", [last, "s", "z"], ["q"]))
    nodes.append(helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]))
    if dtype == "bfloat16":
        nodes.insert(-2, helper.make_node("Cast", [last], ["low"], to=TensorProto.BFLOAT16))
        nodes.append(helper.make_node("Cast", ["low"], ["high"], to=TensorProto.FLOAT))
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in ("y", "m2")]
    graph = helper.make_graph(nodes, "chain", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def split(message: onnx.ModelProto) -> SplitSession | None:
    """Return the sessions of the parts of a message."""
    return create_split_session(message, lambda part: partial(create_session, part.SerializeToString(), None))


@pytest.mark.usefixtures("few_pairs_per_part")
@pytest.mark.parametrize("residual", [False, True])
def test_parts_give_the_bits_of_the_whole(residual: bool) -> None:
    """Values that pass several parts, a repeated weight and inner outputs do not change a bit."""
    message = quantized_chain(residual=residual)
    sessions = split(message)
    assert sessions is not None
    assert len(sessions.parts) > 2
    feeds = [{"x": np.random.default_rng(seed).normal(size=(3, 4)).astype(np.float32)} for seed in (1, 2)]
    whole_session = create_session(message.SerializeToString(), None)
    for feed, outputs in zip(feeds, sessions.run(["m2", "y"], feeds), strict=True):
        for whole, parts in zip(whole_session.run(["m2", "y"], feed), outputs, strict=True):
            np.testing.assert_array_equal(parts, whole)


@pytest.mark.usefixtures("few_pairs_per_part")
def test_only_quantized_values_pass_a_cut() -> None:
    """A cut is behind a QuantizeLinear, so that ONNX Runtime fuses each op with its pairs."""
    sessions = split(quantized_chain())
    assert sessions is not None
    passed = {name for part in sessions.parts[:-1] for name in part.outputs} - {"m2"}
    assert passed <= {f"q{k}" for k in range(6)} | {"q"}
    assert passed


@pytest.mark.usefixtures("few_pairs_per_part")
def test_models_that_cannot_be_split() -> None:
    """Nodes out of order, and values that Python cannot pass on, need a single session."""
    unsorted = quantized_chain()
    nodes = list(reversed(unsorted.graph.node))
    del unsorted.graph.node[:]
    unsorted.graph.node.extend(nodes)
    assert split(unsorted) is None
    assert split(quantized_chain(dtype="bfloat16")) is None
    with_constant = quantized_chain()
    with_constant.graph.output.append(helper.make_tensor_value_info("s", TensorProto.FLOAT, []))
    assert split(with_constant) is None


def test_few_pairs_have_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with the maximum number of pairs is not split; with one more, it is."""
    pairs = sum(node.op_type == "DequantizeLinear" for node in quantized_chain().graph.node)
    monkeypatch.setattr(split_session, "MAX_SESSION_PAIRS", pairs)
    assert split(quantized_chain()) is None
    monkeypatch.setattr(split_session, "MAX_SESSION_PAIRS", pairs - 1)
    assert split(quantized_chain()) is not None


@pytest.mark.parametrize(("hidden", "passed"), [("", ["m1"]), ("m1", ["m2"]), ("r0", None)])
def test_many_outputs_are_cut_at_outputs(
    hidden: str, passed: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float model with many outputs is divided where only outputs pass, and has the bits of one session."""
    monkeypatch.setattr(split_session, "MAX_SESSION_OUTPUTS", 2)
    monkeypatch.setattr(split_session, "OBSERVED_PART_NODES", 3)
    chain = ["r0", *(f"m{k}" for k in range(6))]
    nodes = [helper.make_node("MatMul", [source, "w"], [target]) for source, target in pairwise(chain)]
    nodes.insert(0, helper.make_node("Relu", ["x"], ["r0"]))
    nodes.append(helper.make_node("Add", [chain[-1], "r0"], ["y"]))
    weight = numpy_helper.from_array(np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32), "w")
    values = [name for node in nodes for name in node.output if name != hidden]
    outputs = [onnx.ValueInfoProto(name=name) for name in values]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])]
    graph = helper.make_graph(nodes, "chain", inputs, outputs, [weight])
    message = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    whole, feed = create_session(message.SerializeToString(), None), {"x": np.ones((3, 4), np.float32)}
    sessions = split(message)
    assert sessions is not None
    assert next((part.inputs for part in sessions.parts[1:]), None) == passed
    results = zip(sessions.run(values, [feed])[0], whole.run(values, feed), strict=True)
    assert all(np.array_equal(part, value) for part, value in results)


@pytest.mark.usefixtures("rules_alone")
@pytest.mark.parametrize(("name", "kept"), [("digits_cnn", True), ("digits_rnn", False), ("digits_nested", False)])
def test_validation_in_parts(name: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with bodies, the quantized model has the same validation in parts, except for float rounding."""
    data = f"{SAMPLES / name}_calib.npz"
    whole = gq.insert(SAMPLES / f"{name}.onnx", data=data)
    monkeypatch.setattr(split_session, "MAX_SESSION_PAIRS", 0)
    monkeypatch.setattr(split_session, "PART_NODES", 2)
    set_limits(monkeypatch, MAX_KEPT_PAIRS=4000 if kept else 0)
    parts = gq.insert(SAMPLES / f"{name}.onnx", data=data)
    emitted, emit = [], onnx_runner.emit_message
    monkeypatch.setattr(onnx_runner, "emit_message", lambda *args, **more: emitted.append(args) or emit(*args, **more))
    runner = create_runner(parts.model)
    runner.start()
    assert isinstance(runner._session, SplitSession)
    assert runner._session.kept == kept
    assert set(runner.output_tensors) == set(runner.outputs)
    assert len(emitted) == 1  # although the message was freed
    figures = []
    for result in (parts, whole):
        assert result.validation is not None
        assert result.validation.comparison is not None
        figures.append([(output.name, output.sqnr) for output in result.validation.comparison.outputs])
    assert figures[0] == [(output, pytest.approx(sqnr, abs=0.05)) for output, sqnr in figures[1]]
    assert (parts.time_ratio is None, whole.time_ratio is None) == (not kept, False)


@pytest.mark.usefixtures("few_pairs_per_part")
@pytest.mark.parametrize("parts_at_once", [1, 2, 1000])
@pytest.mark.parametrize("residual", [False, True])
def test_verdicts_in_parts(residual: bool, parts_at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimized parts give the same verdicts as the optimized whole, also if they are read one after the other."""
    onnx.save(quantized_chain(residual=residual), tmp_path / "chain.onnx")
    model = gq.load(tmp_path / "chain.onnx")
    whole = judge_ops(model, "onnxruntime")
    set_limits(monkeypatch, MAX_OPTIMIZED_PAIRS=0)
    monkeypatch.setattr(session, "PARTS_PER_OPTIMIZED_MODEL", parts_at_once)
    optimized = list(onnx_runner.optimize_model(model))
    assert judge_ops(model, "onnxruntime") == whole != ()
    assert (len(optimized) == 1) == (residual or parts_at_once == 1000)  # all parts read the same residual
    for part in optimized:
        names = [op.name for op in part.model.main.ops()]
        assert len(names) == len(set(names))


def repeated_chain(steps: Sequence[str], repeats: int) -> onnx.ModelProto:
    """Return a chain of Q/DQ pairs that repeats `steps`, the types of the ops between them.

    The scales decide whether ONNX Runtime removes a Clip.
    """
    rng = np.random.default_rng(0)
    constants = {"w": rng.integers(-127, 128, (4, 4), np.int8), "wz": np.int8(0), "f": np.eye(4, dtype=np.float32)}
    constants |= {"z": np.uint8(128), "low": np.float32(-5), "high": np.float32(5)}
    nodes, last = [], "x"
    for index, step in enumerate([*steps] * repeats):
        constants |= {f"s{index}": np.float32(rng.uniform(0.01, 0.1)), f"ws{index}": np.float32(rng.uniform(0.01, 0.1))}
        nodes.append(helper.make_node("QuantizeLinear", [last, f"s{index}", "z"], [f"q{index}"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"q{index}", f"s{index}", "z"], [f"d{index}"]))
        operands = [f"d{index}"]
        if step == "MatMul":
            nodes.append(helper.make_node("DequantizeLinear", ["w", f"ws{index}", "wz"], [f"wd{index}"]))
            operands.append(f"wd{index}")
        operands += {"Gemm": ["f"], "Add": [f"d{index}"], "Clip": ["low", "high"]}.get(step, [])
        nodes.append(helper.make_node(step, operands, [last := f"m{index}"]))
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    inputs, outputs = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4])] for name in ("x", last))
    graph = helper.make_graph(nodes, "chain", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


@pytest.mark.usefixtures("few_pairs_per_part")
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(["MatMul", "Add", "Sigmoid", "Tanh", "Gemm", "Clip", "Relu"]), min_size=1, max_size=3),
    st.integers(1, 7),
)
def test_equal_parts_are_judged_once(steps: Sequence[str], repeats: int) -> None:
    """Ops of parts that are optimized alike have the verdicts that they have in the optimized whole."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patches:
        onnx.save(repeated_chain(steps, repeats), Path(folder, "chain.onnx"))
        model = gq.load(Path(folder, "chain.onnx"))
        whole = judge_ops(model, "onnxruntime")
        set_limits(patches, MAX_OPTIMIZED_PAIRS=0)
        assert judge_ops(model, "onnxruntime") == whole
        copied = sum(len(copies) for part in onnx_runner.optimize_model(model) for copies, _ in part.copies)
    if set(steps) == {"MatMul"} and len(steps) * repeats > 6:
        assert copied > 0


@pytest.mark.usefixtures("few_pairs_per_part", "rules_alone")
def test_sessions_of_the_validation_give_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The validation of a model with many pairs writes the optimized parts, so that no session is created for them."""
    numbered = []
    load_numbered = session.load_numbered
    monkeypatch.setattr(
        onnx_runner, "load_numbered", lambda *args, **kwargs: numbered.append(args) or load_numbered(*args, **kwargs)
    )
    set_limits(monkeypatch, MAX_KEPT_PAIRS=0, MAX_OPTIMIZED_PAIRS=0)
    monkeypatch.setattr(validation, "MAX_MEASURED_SITES", 0)
    result = gq.insert(SAMPLES / "digits_cnn.onnx", data=f"{SAMPLES / 'digits_cnn'}_calib.npz")
    assert result.validation is not None
    assert result.validation.comparison is not None
    assert not numbered
    assert result.verdicts == judge_ops(result.model, "onnxruntime") != ()
    assert len(numbered) == 1


def test_float_outputs_come_from_the_session_that_observes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many quantized tensors, no session is created for the float outputs, and their errors are the same."""
    message = quantized_chain()
    del message.graph.node[:], message.graph.initializer[:]
    message.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32)[::-1] / 2, "w"))
    for source, result in pairwise(("x", "m0", "m1", "m2", "y")):
        message.graph.node.append(helper.make_node("MatMul", [source, "w"], [result]))
    onnx.save(message, tmp_path / "float.onnx")
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32))
    insert = partial(gq.insert, tmp_path / "float.onnx", data=str(tmp_path / "data.npz"), rules="generic")
    expected = insert().validation
    monkeypatch.setattr(validation, "MAX_MEASURED_SITES", 0)
    runs, start = [], onnx_runner.OnnxRunner.start
    monkeypatch.setattr(onnx_runner.OnnxRunner, "start", lambda runner: runs.append(runner) or start(runner))
    measured = insert().validation
    assert expected is not None
    assert measured is not None
    assert measured.worst_sqnr == pytest.approx(expected.worst_sqnr)
    assert all(runner.model.op_kinds() >= {"quantize"} for runner in runs)


@pytest.mark.parametrize("count", [1, 2])
def test_sessions_of_parts_are_created_in_order(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Sessions may be created ahead of the runs, each in its place, and an error of a later one is raised."""

    class AddOne:
        def run(self, outputs: list[str], feeds: dict[str, int]) -> list[int]:
            return [value + 1 for value in feeds.values()]

    monkeypatch.setattr(split_session, "CONCURRENT_CREATIONS", count)
    parts = [split_session.SessionPart(AddOne, [f"t{i}"], [f"t{i + 1}"], "") for i in range(7)]
    assert split_session.SplitSession(parts).run(["t7"], [{"t0": 0}, {"t0": 10}]) == [[7], [17]]
    rejected = parts[3]._replace(create=dict.popitem)
    with pytest.raises(TypeError):
        split_session.SplitSession([*parts[:3], rejected, *parts[4:]]).run(["t7"], [{"t0": 0}])


@pytest.mark.usefixtures("few_pairs_per_part", "rules_alone")
def test_the_message_of_the_validation_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command emits a model with many pairs once, for its validation, and writes the same bytes as `save`."""
    set_limits(monkeypatch, MAX_OPTIMIZED_PAIRS=0)
    arguments = ["insert", f"{SAMPLES / 'digits_cnn.onnx'}", "--data", f"{SAMPLES / 'digits_cnn'}_calib.npz"]
    with monkeypatch.context() as patches:
        patches.setattr(file_writer, "emit_message", None)
        assert CliRunner().invoke(main, [*arguments, "-o", f"{tmp_path / 'cli.onnx'}"]).exit_code == 0
    result = gq.insert(SAMPLES / "digits_cnn.onnx", data=f"{SAMPLES / 'digits_cnn'}_calib.npz")
    result.save(tmp_path / "api.onnx")
    assert (tmp_path / "cli.onnx").read_bytes() == (tmp_path / "api.onnx").read_bytes()


def test_merged_graphs() -> None:
    """Equal nodes of two parts are merged; others of the same name are renamed, also where a body captures them."""
    scale = numpy_helper.from_array(np.float32(2), "scale")
    body = helper.make_graph(
        [helper.make_node("Add", ["c", "k"], ["r"])], "body", [], [helper.make_value_info("r", onnx.TypeProto())]
    )
    parts = []
    for index, value in enumerate((1.0, 3.0)):
        source, result = ("x", "m", "y")[index : index + 2]
        nodes = [
            helper.make_node("Mul", ["scale", "scale"], ["s2"]),
            helper.make_node("Mul", [source, "k"], ["c"]),
            helper.make_node("If", ["c"], [result], then_branch=body, else_branch=body),
        ]
        constants = [scale, numpy_helper.from_array(np.float32(value), "k")]
        parts.append(helper.make_model(helper.make_graph(nodes, "g", [], [], constants)))
    merged = split_session.merge_graphs(parts[0], parts).graph
    assert [tensor.name for tensor in merged.initializer] == ["scale", "k", "k/part 1"]
    assert [list(node.output) for node in merged.node] == [["s2"], ["c"], ["m"], ["c/part 1"], ["y"]]
    assert list(merged.node[3].input) == ["m", "k/part 1"]
    branches = [list(attribute.g.node[0].input) for node in merged.node for attribute in node.attribute]
    assert branches == [["c", "k"]] * 2 + [["c/part 1", "k/part 1"]] * 2


@pytest.mark.usefixtures("few_pairs_per_part")
def test_errors_of_a_part_name_the_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op is named that ONNX Runtime rejects in a later part, by the shape of a value of an earlier one."""
    message = quantized_chain()
    node = next(node for node in message.graph.node if node.output[0] == "m4")
    node.name, node.input[1] = "bad", "unfit"
    message.graph.initializer.append(numpy_helper.from_array(np.ones((5, 4), np.float32), "unfit"))
    onnx.save(message, tmp_path / "bad.onnx")
    with pytest.raises(SessionError) as error:
        require_loadable(gq.load(tmp_path / "bad.onnx"))
    assert error.value.op_key == ("", "bad")
    set_limits(monkeypatch, MAX_OPTIMIZED_PAIRS=0)
    with pytest.raises(ModelError, match=r"onnxruntime rejects the model: .*\(bad\)"):
        create_runner(gq.load(tmp_path / "bad.onnx")).run({"x": np.ones((1, 4), np.float32)})


@pytest.mark.usefixtures("few_pairs_per_part")
def test_groups_of_feeds_and_observed_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Feeds that pass the parts in two groups, and tensors that are observed in parts, have the bits of the whole."""
    monkeypatch.setattr(onnx_runner, "FEEDS_PER_SPLIT_RUN", 2)
    message = quantized_chain()
    onnx.save(message, tmp_path / "chain.onnx")
    runner = create_runner(gq.load(tmp_path / "chain.onnx"))
    feeds = [{"x": np.random.default_rng(seed).normal(size=(3, 4)).astype(np.float32)} for seed in range(3)]
    whole = create_session(message.SerializeToString(), None)
    expected = [dict(zip(["y", "m2"], whole.run(["y", "m2"], feed), strict=True)) for feed in feeds]
    outputs = list(runner.run_each(feeds))
    tensors = [runner.output_tensors["y"], runner.output_tensors["m2"]]
    watched = list(runner.observe(tensors, feeds))
    assert len(outputs) == len(watched) == len(feeds)
    for values, actual, observed in zip(expected, outputs, watched, strict=True):
        for name, value in values.items():
            np.testing.assert_array_equal(actual[name], value)
            np.testing.assert_array_equal(observed[runner.output_tensors[name]][0], value)
