"""A model as one graph of ops and constants, made by TensorFlow: what its TFLite converter needs."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.learned import MARK
from graphquant.formats.tensorflow.load import build
from graphquant.formats.tensorflow.run import _fetches, inputs
from graphquant.formats.tensorflow.session import Session, _refusals, _silence
from graphquant.formats.tensorflow.session import tensorflow as installed
from graphquant.formats.tensorflow.source import Source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphquant.ir import Model

__all__ = ["freeze"]

_CALLS: Final = re.compile(r"^(?:Func/)?(?:(?:Stateful)?PartitionedCall(?:_\d+)?/)+")
"""What inlining puts before the names of a function's ops."""

_HANDED_OVER: Final = re.compile(r"^Func/.*/(?:input|output)/_\d+$")
"""How it calls the ops that stand for arguments and results."""


def freeze(model: Model) -> Model:
    """`model` as a GraphDef: variables are constants, functions are inlined, shapes are what TensorFlow knows.

    Inputs and outputs go by the names of the signature; ops keep the names that they have in their function.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: TensorFlow cannot do it.
    """
    source: Source = model.source
    tensorflow = installed()
    with _refusals(tensorflow), _silence():
        if source.form == "GraphDef" and not _has_variables(model):
            graph_def = type(source.message)()
            graph_def.CopyFrom(emit(model))
        else:
            data, ends = _frozen(tensorflow, model)
            graph_def = _renamed(proto.parse_binary(data, proto.GraphDef(), source=str(source.file)), ends)
        _add_shapes(tensorflow, graph_def)
    digest = hashlib.sha256(proto.to_binary(graph_def)).hexdigest()
    frozen = Source(message=graph_def, index=0, text=False, file=source.file, folder=None, digest=digest)
    made = build(frozen, model.path or source.file)
    made.path = model.path
    return made


def _has_variables(model: Model) -> bool:
    """Whether there is something to freeze: functions, variables with values, or learned ranges."""
    values = model.source.live.values if model.source.live else {}
    ranges = any(op.kind == "variable" and MARK in op.attrs for op in model.main.ops())
    return len(model.graphs) > 1 or bool(values) or ranges


def _add_shapes(tensorflow: Any, graph_def: Any) -> None:
    """Writes the static shapes that TensorFlow infers into the nodes, where they are read again."""
    v1 = tensorflow.compat.v1
    graph = tensorflow.Graph()
    with graph.as_default():
        tensorflow.import_graph_def(v1.GraphDef.FromString(proto.to_binary(graph_def)), name="")
    for node in graph_def.node:
        outputs = graph.get_operation_by_name(node.name).outputs
        node.attr.pop("_output_shapes", None)
        if outputs:
            shapes = node.attr["_output_shapes"].list.shape
            shapes.extend(
                proto.TensorShapeProto.FromString(one.shape.as_proto().SerializeToString()) for one in outputs
            )


def _frozen(tensorflow: Any, model: Model) -> tuple[bytes, dict[str, tuple[str, int]]]:
    """The GraphDef of what leads from the signature's inputs to its outputs, in binary form; outputs by their keys."""
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    v1 = tensorflow.compat.v1
    session = Session.start(tensorflow, model)
    fetches, specs = _fetches(model), inputs(model)
    with session.session:
        ends = [name.partition(":")[0] for name in fetches.values()]
        constant = v1.graph_util.convert_variables_to_constants(session.session, session.graph.as_graph_def(), ends)

    def body() -> Any:
        fed = {}
        for spec in specs:
            key = next((alias for alias in spec.aliases if ":" not in alias), spec.name)
            fed[f"{spec.name}:0"] = v1.placeholder(spec.dtype, spec.shape, name=key)
        # The inliner leaves a call alone whose results are not themselves what is asked for.
        results = v1.import_graph_def(constant, name="", input_map=fed, return_elements=list(fetches.values()))
        return list(fed.values()), results

    made: list[Any] = []
    function = v1.wrap_function(lambda: made.extend(body()), [])
    pruned = function.prune(*made)
    plain = convert_variables_to_constants_v2(pruned)
    outputs = {key: (one.name, one.dtype.as_datatype_enum) for key, one in zip(fetches, plain.outputs, strict=True)}
    return plain.graph.as_graph_def().SerializeToString(), outputs


def _renamed(graph_def: Any, ends: Mapping[str, tuple[str, int]]) -> Any:
    """The graph with the names that ops had inside their functions, where these are free, and with outputs `ends`."""
    taken = {node.name for node in graph_def.node}
    for key, (tensor, dtype) in ends.items():
        name = next(name for name in (key, *(f"{key}_{k}" for k in range(1, len(taken) + 2))) if name not in taken)
        taken.add(name)
        graph_def.node.add(name=name, op="Identity", input=[tensor]).attr["T"].type = dtype
    bypassed = {node.name: node.input[0] for node in graph_def.node if _handed_over(node)}
    kept = [node for node in graph_def.node if node.name not in bypassed]
    bare = {node.name: _CALLS.sub("", node.name) for node in kept}
    counts = Counter(bare.values())
    final = {old: new if counts[new] == 1 else old for old, new in bare.items()}
    made = proto.GraphDef(versions=graph_def.versions, library=graph_def.library)
    for node in kept:
        copy = made.node.add()
        copy.CopyFrom(node)
        copy.name = final[node.name]
        copy.attr.pop("_class", None)
        for index, read in enumerate(node.input):
            copy.input[index] = _input(read, bypassed, final)
    return made


def _handed_over(node: Any) -> bool:
    """Whether the inliner made `node` to hand an argument or a result over."""
    return bool(node.op == "Identity" and len(node.input) == 1 and _HANDED_OVER.match(node.name))


def _input(read: str, bypassed: Mapping[str, str], final: Mapping[str, str]) -> str:
    """What a node reads, past ops that are left out, by its new name."""
    control, read = ("^", read[1:]) if read.startswith("^") else ("", read)
    while read.partition(":")[0] in bypassed:
        read = bypassed[read.partition(":")[0]]
    op, colon, port = read.partition(":")
    return f"{control}{final[op]}" if control else f"{final[op]}{colon}{port}"
