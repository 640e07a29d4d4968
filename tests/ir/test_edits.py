"""Edits of the IR on random graphs with bodies and captures: each has its effect and preserves the invariants."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphquant.errors import InternalError, UsageError
from graphquant.ir import Call, Graph, Model, Op, Output, TensorRef, Use, check_invariants

DTYPES = ("float32", "int64", None)
SHAPES = ((2, 3), (None, 3), (2,), None)
INDEX = st.integers(0, 10**6)


def make_op(name: str, *outputs: Output, kind: str = "other", **more) -> Op:
    """Create an op with outputs of any kind."""
    return Op(name=name, kind=kind, type=kind, outputs=outputs or (Output(name, "float32", (2, 3)),), **more)


def snapshot(model: Model) -> list:
    """Return everything that an edit can change, as plain data."""
    return [
        (
            name,
            [(op.name, op, list(graph.slots(op.name))) for op in graph.ops()],
            sorted(map(str, graph.nx.edges(keys=True, data="port"))),
            list(graph.inputs),
            list(graph.outputs),
            sorted(graph.rerouted_uses),
            sorted(graph.removed_ops),
            sorted(graph.reserved_names),
        )
        for name, graph in model.graphs.items()
    ]


def scan(model: Model, tensor: TensorRef) -> set[Use]:
    """Return the consumers of a tensor by a full scan of all slots."""
    return {
        Use(name, node, slot)
        for name, graph in model.graphs.items()
        for node in graph.nx
        for slot, read in enumerate(graph.slots(node))
        if read == tensor
    }


class EditMachine(RuleBasedStateMachine):
    """Random edits; new ops read only older ones, so that the graphs stay acyclic."""

    @initialize()
    def start(self) -> None:
        """Start with a main graph that has a nested body."""
        self.model = Model(format="onnx")
        self.age: dict[tuple[str, str], int] = {}
        reserved_names: set[str] = set()
        for name, parent in (("", None), ("if/then", ("", "if")), ("if/then/loop/body", ("if/then", "loop"))):
            self.model.graphs[name] = Graph(name, self.model.graphs, parent=parent, reserved_names=reserved_names)
        for name, owner, body in (("", "if", "if/then"), ("if/then", "loop", "if/then/loop/body")):
            graph = self.model.graphs[name]
            self.add_op(graph, make_op(f"{owner}_in", kind="input"), [])
            self.add_op(graph, make_op(owner, calls=(Call("body", body),)), [])
        self.copies: list[tuple[Model, list]] = []

    def add_op(self, graph: Graph, new: Op, inputs: list) -> TensorRef:
        """Add an op and record its age."""
        self.age[graph.name, new.name] = len(self.age)
        return graph.add_op(new, inputs)

    def tensors(self, graph: Graph, before: int = 10**9) -> list[TensorRef]:
        """Return the tensors that an op of that age in `graph` may read without a cycle."""
        visible: list[TensorRef] = []
        enclosing: Graph | None = graph
        while enclosing is not None:
            for op_in_scope in enclosing.ops():
                if self.age[enclosing.name, op_in_scope.name] < before:
                    visible += [
                        TensorRef(enclosing.name, op_in_scope.name, port) for port in range(len(op_in_scope.outputs))
                    ]
            if enclosing.parent is None:
                break
            before = min(before, self.age[enclosing.parent])
            enclosing = self.model.graphs[enclosing.parent[0]]
        return visible

    def graph(self, pick: int) -> Graph:
        """Draw a graph."""
        return list(self.model.graphs.values())[pick % len(self.model.graphs)]

    def uses(self) -> list[Use]:
        """Return all uses."""
        return [
            Use(name, node, slot)
            for name, graph in self.model.graphs.items()
            for node in graph.nx
            for slot in range(len(graph.slots(node)))
        ]

    @rule(
        pick=INDEX,
        picks=st.lists(INDEX, max_size=4),
        dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=2),
        shape=st.sampled_from(SHAPES),
        gap=st.booleans(),
    )
    def add(self, pick, picks, dtypes, shape, gap) -> None:
        """A new op reads its inputs and has no consumers."""
        graph = self.graph(pick)
        visible = self.tensors(graph)
        inputs = [visible[p % len(visible)] for p in picks] if visible else []
        inputs += [None] if gap else []
        name = graph.unique_name("op")
        assert name not in graph.reserved_names
        output = self.add_op(
            graph, make_op(name, *(Output(f"{name}_{i}", d, shape) for i, d in enumerate(dtypes))), inputs
        )
        assert output == TensorRef(graph.name, name, 0)
        assert graph.slots(name) == inputs
        assert graph.consumers(output) == []

    @precondition(lambda self: self.uses())
    @rule(pick=INDEX, to=INDEX, some=st.integers(0, 255))
    def reroute(self, pick, to, some) -> None:
        """Exactly the selected uses change, or nothing does."""
        use = self.uses()[pick % len(self.uses())]
        tensor = self.model.graphs[use.graph].source_of(use)
        if tensor is None:
            return
        home = self.model.graphs[tensor.graph]
        everyone = home.consumers(tensor)
        uses = [use for i, use in enumerate(everyone) if some >> (i % 8) & 1]
        every = [
            TensorRef(g, o.name, p)
            for g, h in self.model.graphs.items()
            for o in h.ops()
            for p in range(len(o.outputs))
        ]
        new = every[to % len(every)]
        if any(
            new not in self.tensors(self.model.graphs[u.graph], self.age[u[:2]])
            and self.model.graphs[u.graph].can_read(new.graph)
            for u in uses
        ):
            return  # it would make a cycle
        old, out = self.model.output(tensor), self.model.output(new)
        fits = old.dtype is None or out.dtype is None or old.dtype == out.dtype
        fits &= (
            old.shape is None
            or out.shape is None
            or (
                len(old.shape) == len(out.shape)
                and all(None in pair or pair[0] == pair[1] for pair in zip(old.shape, out.shape, strict=True))
            )
        )
        before, read_before = snapshot(self.model), scan(self.model, new)
        if not fits or not all(self.model.graphs[u.graph].can_read(new.graph) for u in uses):
            with pytest.raises(UsageError):
                home.reroute(tensor, uses, new)
            assert snapshot(self.model) == before
            return
        assert home.reroute(tensor, uses * 2, new) == len(uses)
        assert scan(self.model, new) == read_before | set(uses)
        if new != tensor:
            assert scan(self.model, tensor) == set(everyone) - set(uses)

    @precondition(lambda self: self.uses())
    @rule(pick=INDEX, wrong=INDEX)
    def refuse_wrong_uses(self, pick, wrong) -> None:
        """A wrong use is rejected, and the valid uses in the same call do not change."""
        uses = self.uses()
        good, bad = uses[pick % len(uses)], uses[wrong % len(uses)]
        tensor = self.model.graphs[good.graph].source_of(good)
        if tensor is None:
            return
        home, before = self.model.graphs[tensor.graph], snapshot(self.model)
        wrong_uses = [bad] if self.model.graphs[bad.graph].source_of(bad) != tensor else []
        for wrong_use in (
            *wrong_uses,
            Use("", "no such op", 0),
            Use("nowhere", "if", 0),
            good._replace(slot=99),
            good._replace(slot=-1),
        ):
            with pytest.raises(UsageError, match="does not read"):
                home.reroute(tensor, [good, wrong_use], tensor)
        for missing in (
            TensorRef("", "none"),
            TensorRef("nowhere", "if"),
            tensor._replace(port=9),
            tensor._replace(port=-1),
        ):
            with pytest.raises(UsageError, match="has no tensor"):
                home.reroute(tensor, [good], missing)
        assert snapshot(self.model) == before

    @precondition(lambda self: self.uses())
    @rule(pick=INDEX, to=INDEX, empty=st.booleans(), beyond=st.integers(0, 2))
    def connect(self, pick, to, empty, beyond) -> None:
        """The source of one slot changes."""
        use = self.uses()[pick % len(self.uses())]
        graph = self.model.graphs[use.graph]
        use = use._replace(slot=use.slot + beyond)
        visible = self.tensors(graph, self.age[use[:2]])
        new = None if empty or not visible else visible[to % len(visible)]
        graph.set_source(use, new)
        assert graph.source_of(use) == new
        assert use in graph.rerouted_uses

    @rule(pick=INDEX, which=INDEX)
    def remove(self, pick, which) -> None:
        """An op without consumers is removed with its edges. An op with consumers or a body stays."""
        graph = self.graph(pick)
        ops = list(graph.ops())
        if not ops:
            return
        name, before = ops[which % len(ops)].name, snapshot(self.model)
        if graph.op(name).calls or graph.consumers_by_port(name):
            with pytest.raises(InternalError, match="still"):
                graph.remove_op(name)
            assert snapshot(self.model) == before
            return
        graph.remove_op(name)
        assert name not in graph
        assert name in graph.removed_ops
        assert not any(use.op == name for use in graph.rerouted_uses)

    @rule(pick=INDEX, which=INDEX)
    def replace(self, pick, which) -> None:
        """The new op of the same name has the inputs and consumers of the old one."""
        graph = self.graph(pick)
        ops = [candidate for candidate in graph.ops() if not candidate.calls]
        if not ops:
            return
        old = ops[which % len(ops)]
        slots, readers = list(graph.slots(old.name)), graph.consumers_by_port(old.name)
        new = make_op(old.name, *old.outputs, kind="relu")
        graph.replace_op(new)
        assert graph.op(old.name) is new
        assert (graph.slots(old.name), graph.consumers_by_port(old.name)) == (slots, readers)

    @rule()
    def copy(self) -> None:
        """Continue with a copy. The original must not change any more."""
        before = snapshot(self.model)
        self.copies.append((self.model, before))
        self.model = self.model.copy()
        assert snapshot(self.model) == before

    @invariant()
    def holds(self) -> None:
        """Invariants hold, consumers equal those of a full scan, and originals of copies are unchanged."""
        if not hasattr(self, "model"):
            return
        check_invariants(self.model, "test")
        for name, graph in self.model.graphs.items():
            for graph_op in graph.ops():
                for port in range(len(graph_op.outputs)):
                    tensor = TensorRef(name, graph_op.name, port)
                    consumers = graph.consumers(tensor)
                    assert len(consumers) == len(set(consumers))
                    assert set(consumers) == scan(self.model, tensor)
        for model, before in self.copies[-2:]:
            assert snapshot(model) == before


EditMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_edits = EditMachine.TestCase


def small_graph() -> Model:
    """Build a graph of x -> add(x, x) -> output."""
    model = Model(format="onnx")
    graph = model.graphs[""] = Graph("", model.graphs)
    x = graph.add_op(make_op("x", kind="input"))
    total = graph.add_op(make_op("add"), [x, x])
    graph.add_op(make_op("out", kind="output"), [total], control_sources=["x"])
    graph.inputs, graph.outputs = ["x"], ["out"]
    return model


def test_reroute_moves_only_the_selected_slot() -> None:
    """One of the two edges of `Add(x, x)` can be rerouted."""
    model = small_graph()
    graph = model.main
    x = TensorRef("", "x")
    fake = graph.add_op(make_op("x/quant"), [x])
    assert graph.reroute(x, [Use("", "add", 1)], fake) == 1
    assert graph.slots("add") == [x, fake]
    assert graph.consumers(x) == [Use("", "add", 0), Use("", "x/quant", 0)]
    assert graph.control_inputs("out") == ["x"]
    assert graph.rerouted_uses == {Use("", "add", 1)}


def test_unique_names() -> None:
    """A used name gets the smallest unused suffix. The name of a removed op stays reserved."""
    graph = small_graph().main
    assert graph.unique_name("y") == "y"
    assert graph.unique_name("x") == "x_1"
    graph.add_op(make_op("x_1"))
    assert graph.unique_name("x") == "x_2"
    graph.remove_op("x_1")
    assert graph.unique_name("x") == "x_2"


def test_impossible_edits_raise_internal_errors() -> None:
    """Impossible edits raise before anything is changed."""
    model = small_graph()
    graph = model.main
    with pytest.raises(InternalError, match="already exists"):
        graph.add_op(make_op("x"))
    with pytest.raises(InternalError, match="must run after 'nothing'"):
        graph.connect_inputs("x", [], control_sources=["nothing"])
    before = snapshot(model)
    for tensor in (TensorRef("", "nothing"), TensorRef("elsewhere", "x")):
        with pytest.raises(InternalError):
            graph.set_source(Use("", "add", 0), tensor)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda g: g.nx.remove_edge("x", "add", key=1), r"add\[1\] reads x:0,.*edge"),
        (lambda g: g.nx.add_edge("x", "out", key=7, port=0), "1 data edges"),
        (lambda g: g.nx.add_node("ghost"), "Node 'ghost'"),
        (lambda g: g.outputs.append("add"), "output 'add'"),
        (lambda g: g.inputs.append("gone"), "input 'gone'"),
        (lambda g: g.slots("add").__setitem__(0, TensorRef("", "x", 3)), "that op has 1 outputs"),
        (lambda g: g.slots("add").__setitem__(0, TensorRef("", "x", -1)), "that op has 1 outputs"),
        (lambda g: g.slots("add").__setitem__(0, TensorRef("", "gone")), r"add\[0\] reads gone:0,.*scope"),
        (lambda g: g.set_source(Use("", "add", 0), TensorRef("", "add")), "add .*cycle"),
    ],
)
def test_invariants_detect_damage(damage, message: str) -> None:
    """The error names the broken invariant and the stage that caused it."""
    model = small_graph()
    check_invariants(model, "test")
    damage(model.main)
    with pytest.raises(InternalError, match=f"After test, .*: .*{message}"):
        check_invariants(model, "test")


def graph_with_body() -> Model:
    """Build a main graph whose op `if` owns a body that reads `x`."""
    model = small_graph()
    model.main.add_op(make_op("if", calls=(Call("then_branch", "if/then"),)), [TensorRef("", "x")])
    body = model.graphs["if/then"] = Graph("if/then", model.graphs, parent=("", "if"))
    body.add_op(make_op("relu"), [TensorRef("", "x")])
    return model


def test_invariants_detect_damaged_captures() -> None:
    """A capture without its edge, an edge without its capture, and a missing owner are detected."""
    key = ("capture", Use("if/then", "relu", 0))
    model = graph_with_body()
    assert model.main.consumers(TensorRef("", "x"))[-1] == key[1]
    assert model.graphs["if/then"].consumers(TensorRef("", "x")) == model.main.consumers(TensorRef("", "x"))
    check_invariants(model, "test")
    model.main.nx.remove_edge("x", "if", key=key)
    with pytest.raises(InternalError, match=r"'if/then' .*: .*relu\[0\] reads x:0,.*edge"):
        check_invariants(model, "test")
    model = graph_with_body()
    model.graphs["if/then"].nx.remove_node("relu")
    with pytest.raises(InternalError, match=r"capture edge x -> if .*relu\[0\]"):
        check_invariants(model, "test")
    model = graph_with_body()
    model.main.nx.remove_node("if")
    with pytest.raises(InternalError, match="owner 'if'"):
        check_invariants(model, "test")


def test_networkx_sees_the_edits() -> None:
    """The graph of networkx has the nodes and edges of the graph, also those that are added or removed later."""
    graph = small_graph().main
    assert list(graph.nx) == [op.name for op in graph.ops()]
    graph.add_op(make_op("late"), [TensorRef("", "x")])
    assert graph.nx.has_edge("x", "late", key=0)
    graph.remove_op("late")
    assert "late" not in graph.nx
    assert "late" not in graph.nx.succ["x"]


def test_values_are_shared_by_copies() -> None:
    """A copy's ops are the same objects; its graphs are not."""
    model = small_graph()
    value = np.zeros(3)
    model.main.add_op(make_op("c", kind="constant", read_value=lambda: value))
    copied = model.copy()
    assert copied.main.op("c") is model.main.op("c")
    assert copied.main.nx is not model.main.nx
    assert copied.main.graphs is copied.graphs
