"""Parameters and their values, through chains, frames, calls and loops."""

from types import SimpleNamespace

import numpy as np
import pytest

from graphquant.errors import ModelError
from graphquant.ir import Call, Graph, Model, Op, Output, Parameters, TensorRef, Use, paused_gc, require_finite_weight
from graphquant.ir import parameters as module

EIGHT = np.arange(8.0, dtype=np.float32)


def evaluate(op: Op, inputs: list) -> list | None:
    """Evaluate the pure ops of these tests; return None for others."""
    table = {"neg": np.negative, "add": np.add, "concat": lambda *parts: np.concatenate(parts), "split": None}
    if op.kind == "split":
        return np.split(inputs[0], 2)
    function = table.get(op.kind)
    return None if function is None else [function(*inputs)]


class ModelBuilder:
    """Builds a model, and determines its parameters."""

    def __init__(self, *bodies: str) -> None:
        """Create a model with a main graph and the functions `bodies`."""
        self.model = Model(format="tensorflow", source=SimpleNamespace(evaluate_op=evaluate))
        for name in ("", *bodies):
            self.model.graphs[name] = Graph(name, self.model.graphs)

    def add(self, kind: str, *inputs, name: str = "", graph: str = "", outputs: int = 1, **more) -> TensorRef:
        """Add an op of `kind` and return its output."""
        target_graph = self.model.graphs[graph]
        label = target_graph.unique_name(name or kind)
        op = Op(name=label, kind=kind, type=kind, outputs=tuple(Output(label) for _ in range(outputs)), **more)
        if kind in {"input", "output"}:
            (target_graph.inputs if kind == "input" else target_graph.outputs).append(label)
        return target_graph.add_op(op, inputs)

    def constant(self, value=EIGHT, graph: str = "") -> TensorRef:
        """Add a constant."""
        return self.add("constant", graph=graph, read_value=lambda: value)

    def value(self, tensor: TensorRef):
        """Return the value of a tensor, or None."""
        return Parameters(self.model).value(tensor)

    def is_parameter(self, tensor: TensorRef) -> bool:
        """Return True if a tensor is a parameter."""
        return Parameters(self.model).is_parameter(tensor)


@pytest.mark.parametrize("kinds", [(), ("identity",), ("identity", "enter"), ("enter", "switch"), ("read_variable",)])
def test_forwarding_chains(kinds) -> None:
    """A constant is found through identities and frames, and is their root tensor."""
    built = ModelBuilder()
    start = current = built.constant()
    for kind in kinds:
        current = built.add(kind, current, outputs=2 if kind == "switch" else 1)
    assert built.value(current) is EIGHT
    assert Parameters(built.model).root_tensor(current) == start
    if kinds[-1:] == ("switch",):
        assert built.value(current._replace(port=1)) is EIGHT


def test_a_variable_whose_value_is_not_in_the_files() -> None:
    """The variable and tensors computed from it are parameters without values."""
    built = ModelBuilder()
    variable = built.add("variable")
    read = built.add("read_variable", variable)
    for tensor in (variable, read, built.add("neg", read)):
        assert built.is_parameter(tensor)
        assert built.value(tensor) is None


def test_chains_of_pure_ops() -> None:
    """A tensor computed from parameters has the value that the format computes, for each output."""
    built = ModelBuilder()
    first = built.constant()
    split = built.add("split", built.add("neg", built.add("identity", first)), outputs=2)
    total = built.add("add", split, split._replace(port=1))
    assert built.value(split._replace(port=1)).tolist() == [-4.0, -5.0, -6.0, -7.0]
    assert built.value(total).tolist() == [-4.0, -6.0, -8.0, -10.0]
    assert Parameters(built.model).root_tensor(total) == total


@pytest.mark.parametrize("kind", ["softplus", "split"])
def test_ops_without_an_evaluator_have_no_value(kind: str) -> None:
    """An op or output that the format cannot evaluate has no value, and later ops have none either."""
    built = ModelBuilder()
    odd = built.add(kind, built.constant(), outputs=3)._replace(port=2)
    after = built.add("neg", odd)
    assert built.is_parameter(after)
    assert built.value(odd) is None
    assert built.value(after) is None
    built.model.source = None
    assert built.value(built.add("neg", built.constant())) is None


@pytest.mark.parametrize("kind", ["dequantize", "quantize", "qdq", "random", "stateful", "call", "merge"])
def test_ops_whose_result_is_no_parameter(kind: str) -> None:
    """Quantized values, random values and merged branches are not parameters, even if their inputs are."""
    built = ModelBuilder()
    assert not built.is_parameter(built.add(kind, built.constant(), built.constant()))


def test_values_computed_from_inputs_are_no_parameters() -> None:
    """Graph inputs, tensors computed from them, and ops with an empty slot or without inputs are not parameters."""
    built = ModelBuilder()
    x = built.add("input", name="x")
    assert not built.is_parameter(x)
    assert built.value(x) is None
    assert not built.is_parameter(built.add("add", built.constant(), x))
    assert not built.is_parameter(built.add("add", built.constant(), None))
    assert not built.is_parameter(built.add("other"))


def test_captures() -> None:
    """A constant of an enclosing graph is a parameter in the body that reads it."""
    built = ModelBuilder()
    captured = built.constant()
    built.add("if", name="if", calls=(Call("then_branch", "if/then"),))
    built.model.graphs["if/then"] = Graph("if/then", built.model.graphs, parent=("", "if"))
    assert built.value(built.add("neg", captured, graph="if/then")).tolist() == (-EIGHT).tolist()


def called(*passed, offset: int | None = 0) -> tuple[ModelBuilder, TensorRef]:
    """Build a function with two arguments. `passed` selects the second operand of each caller."""
    built = ModelBuilder("f")
    built.add("input", name="a", graph="f")
    weight = built.add("input", name="w", graph="f")
    built.add("input", name="x")
    shared = built.constant()
    tensors = {"shared": shared, "x": TensorRef("", "x")}
    for passed_kind in passed:
        operand = tensors.get(passed_kind) or built.constant(EIGHT * 2)
        gap = [] if offset is None else [None] * offset
        built.add("call", *gap, TensorRef("", "x"), operand, calls=(Call("f", "f", offset),))
    return built, weight


@pytest.mark.parametrize("offset", [0, 1])
def test_an_argument_of_one_caller_or_of_several_that_agree(offset: int) -> None:
    """The argument has the value that callers pass."""
    for passed in (["shared"], ["shared", "shared"]):
        built, weight = called(*passed, offset=offset)
        inner = built.add("identity", weight, graph="f")
        assert built.value(inner) is EIGHT
        assert Parameters(built.model).root_tensor(inner) == TensorRef("", "constant")
        assert not built.is_parameter(TensorRef("f", "a"))


def test_arguments_of_callers_that_differ() -> None:
    """Different weights are a parameter without a value. If one caller passes an input, it is not a parameter."""
    built, weight = called("shared", "own")
    assert built.is_parameter(weight)
    assert built.value(weight) is None
    assert Parameters(built.model).root_tensor(weight) == weight
    for passed in (["shared", "x"], ["x", "shared"], []):
        built, weight = called(*passed)
        assert not built.is_parameter(weight)
    built, weight = called("shared", offset=None)
    assert not built.is_parameter(weight)


def loop(kind: str | None) -> tuple[ModelBuilder, TensorRef]:
    """Build a loop whose body passes its second input through `kind`, returns another input, or returns no value."""
    built = ModelBuilder("body")
    first, weight = (built.add("input", name=name, graph="body") for name in "aw")
    fed_back = {"same": weight, "swap": first}.get(kind) or (built.add(kind, weight, graph="body") if kind else None)
    built.add("output", first, name="a_out", graph="body")
    if fed_back is not None:
        built.add("output", fed_back, name="w_out", graph="body")
    x = built.add("input", name="x")
    built.add("while", x, built.constant(), calls=(Call("body", "body", 0, loop=True),))
    return built, weight


@pytest.mark.parametrize(
    ("kind", "known"), [("same", True), ("identity", True), ("neg", False), ("swap", False), (None, False)]
)
def test_loop_arguments(kind: str | None, known: bool) -> None:
    """The input of a loop is a parameter only if the body passes it through."""
    built, weight = loop(kind)
    assert built.is_parameter(weight) is known
    assert (built.value(weight) is EIGHT) is known
    assert not built.is_parameter(TensorRef("body", "a"))


def test_a_ring_of_identities_in_a_loop_body() -> None:
    """A damaged body whose output is a ring of identities does not hang."""
    built, weight = loop("identity")
    body = built.model.graphs["body"]
    body.set_source(Use("body", "identity", 0), built.add("identity", TensorRef("body", "identity"), graph="body"))
    assert not built.is_parameter(weight)


@pytest.mark.parametrize("kinds", [("identity", "identity"), ("neg", "add"), ("enter", "neg", "switch")])
def test_cycles_end(kinds) -> None:
    """Ops that depend on themselves and their consumers are not parameters, for each order of queries."""
    for entry in range(len(kinds) + 1):
        built = ModelBuilder()
        start = current = built.add(kinds[0], None)
        ring = [start]
        for kind in kinds[1:]:
            current = built.add(kind, current, *([built.constant()] if kind == "add" else []))
            ring.append(current)
        built.model.main.set_source(Use("", start.op, 0), current)
        ring.append(built.add("neg", current))
        parameters = Parameters(built.model)
        order = ring[entry:] + ring[:entry]
        assert [parameters.is_parameter(tensor) for tensor in order] == [False] * len(ring)


@pytest.mark.parametrize("kind", [pytest.param("identity", marks=pytest.mark.slow), "neg"])
def test_chains_of_any_length(kind: str) -> None:
    """A chain of 200,000 ops is resolved without recursion."""
    built = ModelBuilder()
    main, current = built.model.main, built.constant(np.ones(1))
    length = 200_000 if kind == "identity" else 20_000
    with paused_gc():
        for i in range(length):
            current = main.add_op(Op(name=f"n{i}", kind=kind, type=kind, outputs=(Output(f"n{i}"),)), [current])
    parameters = Parameters(built.model)
    assert parameters.is_parameter(current)
    assert parameters.value(current) == 1.0
    assert parameters.root_tensor(current).op == ("constant" if kind == "identity" else f"n{length - 1}")


def test_chains_that_would_fill_memory(monkeypatch) -> None:
    """A chain with too many elements has no value: in total, in the inputs of an op, or by its shape."""
    monkeypatch.setattr(module, "MAX_FOLDED_ELEMENTS", 20)
    built = ModelBuilder()
    once = built.add("neg", built.constant())
    twice = built.add("neg", once)
    assert built.value(twice).tolist() == EIGHT.tolist()
    assert built.value(built.add("neg", twice)) is None
    assert built.value(built.add("concat", *[built.constant()] * 3)) is None
    large = Op(name="large", kind="neg", type="neg", outputs=(Output("large", "float32", (3, 7)),))
    assert built.value(built.model.main.add_op(large, [built.constant()])) is None


def test_weights_must_be_finite() -> None:
    """A finite weight is returned. The error for NaN or infinity names the weight."""
    assert require_finite_weight(EIGHT, TensorRef("", "w")) is EIGHT
    for bad in (np.nan, np.inf):
        with pytest.raises(ModelError, match="The weight w:0 holds NaN or infinity"):
            require_finite_weight(np.array([1.0, bad]), TensorRef("", "w"))
