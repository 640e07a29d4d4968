"""Variables captured by functions: each call passes all arguments that its functions take."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphquant.errors import UsageError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.learned_ranges import LearnedRange, add_to_object_graph, capture_in_functions
from graphquant.formats.tensorflow.values import type_number

BRANCHES = {
    "PartitionedCall": ["f"],
    "If": ["then_branch", "else_branch"],
    "StatelessIf": ["then_branch", "else_branch"],
}
BRANCHES |= {"While": ["cond", "body"]}
OFFSETS = {"If": 1, "StatelessIf": 1}


def variable(graph: str, shared: str) -> LearnedRange:
    """Return a variable of a learned range in a function, or in the main graph."""
    value = np.array([1.0, 2.0], np.float32)
    return LearnedRange(
        graph=graph, node=shared, is_fetchable=not graph, shared_name=shared, value=value, trainable=True
    )


def function(library, name: str):
    """Add a function with one float argument and one result."""
    new_function = library.function.add()
    new_function.signature.name = name
    new_function.signature.input_arg.add(name="x", type=type_number("float32"))
    new_function.signature.output_arg.add(name="y", type=type_number("float32"))
    new_function.ret["y"] = "x"
    new_function.attr["_input_shapes"].list.shape.add()
    return new_function


def call(nodes, name: str, kind: str, functions: list[str]) -> None:
    """Add a node that calls functions with one float."""
    node = nodes.add(name=name, op=kind, input=[*(["p"] * OFFSETS.get(kind, 0)), "x", "^before"])
    for attr, called in zip(BRANCHES[kind], functions, strict=True):
        node.attr[attr].func.name = called
    types = "T" if kind == "While" else "Tin"
    node.attr[types].list.type.append(type_number("float32"))
    if kind == "While":
        node.attr["output_shapes"].list.shape.add()
        node.attr["_num_original_outputs"].i = 1


def read(body, shared: str) -> None:
    """Add a variable to a function, and a node that reads it."""
    body.node_def.add(name=shared, op="VarHandleOp")
    body.node_def.add(name=f"{shared}/Read", op="ReadVariableOp", input=[f"{shared}:resource:0"])


def check(graph_def) -> None:
    """Assert that calls have as many inputs and types as their functions have arguments; loops return theirs."""
    bodies = {body.signature.name: body for body in graph_def.library.function}
    for nodes in (graph_def.node, *(body.node_def for body in bodies.values())):
        for node in nodes:
            kind = {"StatefulPartitionedCall": "PartitionedCall"}.get(node.op, node.op)
            for attr in BRANCHES.get(kind, ()):
                body = bodies[node.attr[attr].func.name]
                data = [text for text in node.input if not text.startswith("^")][OFFSETS.get(kind, 0) :]
                types = node.attr["T" if kind == "While" else "Tin"].list.type
                assert len(body.signature.input_arg) == len(data) == len(types)
                assert len(body.attr["_input_shapes"].list.shape) == len(data)
                assert [arg.type for arg in body.signature.input_arg] == list(types)
                assert node.input[-1] == "^before"
            if node.op == "While":
                loop = bodies[node.attr["body"].func.name]
                assert len(loop.signature.output_arg) == len(loop.ret) == len(node.attr["T"].list.type)
                assert node.attr["_num_original_outputs"].i == len(node.attr["output_shapes"].list.shape)
            for text in node.input if node.op == "ReadVariableOp" else ():
                holder = next(body for body in bodies.values() if any(inner is node for inner in body.node_def))
                assert text in {arg.name for arg in holder.signature.input_arg}


@given(
    st.lists(
        st.tuples(
            st.integers(-1, 5), st.sampled_from(list(BRANCHES)), st.lists(st.integers(0, 5), min_size=2, max_size=2)
        ),
        max_size=10,
    ),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc")), max_size=5, unique=True),
)
def test_calls_of_any_shape(calls, reads) -> None:
    """Nested, shared and recursive calls, loops, and branches of which one needs a variable."""
    graph_def = proto.GraphDef()
    bodies = [function(graph_def.library, f"f{number}") for number in range(6)]
    loops = set()
    for number, (holder, kind, called) in enumerate(calls):
        names = [f"f{number}" for number in called][: len(BRANCHES[kind])]
        if kind == "While":
            if names[0] == names[1] or names[1] in loops:
                continue
            loops.add(names[1])
        call(graph_def.node if holder < 0 else bodies[holder].node_def, f"call{number}", kind, names)
    if any(kind != "While" and f"f{number}" in loops for _, kind, called in calls for number in called):
        return  # a loop's body returns what it takes, which nothing else expects
    learned = [variable(f"f{number}", shared) for number, shared in reads]
    for learned_variable in learned:
        read(bodies[int(learned_variable.graph[1:])], learned_variable.shared_name)
    needed = capture_in_functions(graph_def, learned)
    check(graph_def)
    assert all(variable.shared_name in needed[variable.graph] for variable in learned)
    handles = [node for node in graph_def.node if node.op == "VarHandleOp"]
    shared_names = {shared for names_of_function in needed.values() for shared in names_of_function}
    assert sorted(node.attr["shared_name"].s.decode() for node in handles) == sorted(shared_names)
    assert not [node for body in graph_def.library.function for node in body.node_def if node.op == "VarHandleOp"]


def test_capturing_functions_are_stateful() -> None:
    """Stateless calls and branches, which TensorFlow may prune, are replaced by stateful ones."""
    graph_def = proto.GraphDef()
    body = function(graph_def.library, "f")
    function(graph_def.library, "g")
    read(body, "a")
    call(graph_def.node, "call", "PartitionedCall", ["f"])
    call(graph_def.node, "if", "StatelessIf", ["g", "f"])
    capture_in_functions(graph_def, [variable("f", "a")])
    assert {node.name: node.op for node in graph_def.node} == {
        "call": "StatefulPartitionedCall",
        "if": "If",
        "learned_ranges/a": "VarHandleOp",
    }
    assert list(graph_def.node[0].input) == ["x", "learned_ranges/a", "^before"]
    assert all(body.signature.is_stateful for body in graph_def.library.function)
    assert body.signature.input_arg[1].handle_data[0].shape.dim[0].size == 2


def test_other_callers_are_refused() -> None:
    """An op that cannot take more inputs is named in the error."""
    graph_def = proto.GraphDef()
    read(function(graph_def.library, "f"), "a")
    graph_def.node.add(name="map", op="MapDataset", input=["x"]).attr["f"].func.name = "f"
    with pytest.raises(UsageError, match=r"'map' \(MapDataset\)"):
        capture_in_functions(graph_def, [variable("f", "a")])


def test_objects_of_a_saved_model() -> None:
    """The variables form a list of the root, with a free name, bound to the functions that take them."""
    objects = proto.message_class("SavedObjectGraph")()
    objects.nodes.add().children.add(node_id=0, local_name="learned_ranges")
    objects.concrete_functions["f"].bound_inputs.append(0)
    label = add_to_object_graph(
        objects, [variable("f", "a"), variable("g", "a"), variable("g", "b")], {"f": ["a"], "g": ["a", "b"]}
    )
    assert label == "learned_ranges_1"
    assert list(objects.concrete_functions) == ["f"]
    (bound,) = list(objects.concrete_functions["f"].bound_inputs)[1:]
    assert objects.nodes[bound].variable.name == "a"
    list_node = objects.nodes[objects.nodes[0].children[1].node_id]
    assert [objects.nodes[child.node_id].variable.name for child in list_node.children] == ["a", "b"]
