"""Names of traced functions without the numbers of their traces, so that two traces of one model are alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.learned_ranges import unique_node_name

_TRACED_NAME: Final = re.compile(r"(?:__inference_)?(.+?)(?:_\d+)?")
_NUMBER_SUFFIX: Final = re.compile(r"_\d+")
_UNUSED_ARGUMENT: Final = "___redundant_placeholder"

_USER_NAME_ATTR: Final = "_user_specified_name"
"""The attribute of a function's argument with the caller's name for it; for captures it is a number."""

GRADIENT_ATTR: Final = "_gradient_op_type"  # the attribute of a node that names its registered gradient
_CALL_GRADIENT_PREFIX: Final = b"PartitionedCall-"
"""The prefix of the gradient that was registered when the function was traced. It belongs to the unedited function."""


def normalize_function_names(graph_def: Any) -> dict[str, str]:
    """Remove trace numbers from the function names and sort the functions; return new names by old ones."""
    used_names: set[str] = set()
    names = {}
    library = graph_def.library
    for name in sorted((function.signature.name for function in library.function), key=_trace_order):
        match = _TRACED_NAME.fullmatch(name)
        names[name] = unique_node_name(used_names, match[1] if match else name)
    rename_functions(proto.all_nodes(graph_def), names)
    for function in library.function:
        function.signature.name = names[function.signature.name]
        _normalize_resource_names(function)
    for gradient in library.gradient:
        gradient.function_name = names.get(gradient.function_name, gradient.function_name)
    for gradient in (*library.gradient, *library.registered_gradients):
        gradient.gradient_func = names.get(gradient.gradient_func, gradient.gradient_func)
    library.function.sort(key=lambda function: str(function.signature.name))
    return names


def _trace_order(name: str) -> tuple[str, int, str]:
    """Sort key of a function: its name, then the order of tracing."""
    base, _, number = name.rpartition("_")
    return (base, int(number), name) if number.isdecimal() else (name, -1, name)


def rename_functions(nodes: Iterable[Any], names: Mapping[str, str]) -> None:
    """Replace the names of functions, by old names, in the ops and attributes of nodes."""
    for node in nodes:
        node.op = names.get(node.op, node.op)
        for _, function in proto.function_attrs(node):
            function.name = names.get(function.name, function.name)


def _normalize_resource_names(function: Any) -> None:
    """Remove tensor numbers from the names of a function's resource arguments and results."""
    input_args, output_args = function.signature.input_arg, function.signature.output_arg
    used = {node.name for node in function.node_def} | {arg.name for arg in input_args if not _is_resource(arg)}
    names = {
        arg.name: unique_node_name(used, _NUMBER_SUFFIX.sub("", arg.name)) for arg in input_args if _is_resource(arg)
    }
    for index, arg in enumerate(input_args):
        arg.name = names.get(arg.name, arg.name)
        if index in function.arg_attr:
            function.arg_attr[index].attr.pop(_USER_NAME_ATTR, None)
    for node in function.node_def if names else ():
        node.input[:] = [names.get(tensor, tensor) for tensor in node.input]
    results = [function.ret[arg.name] for arg in output_args]
    function.ret.clear()
    used = {arg.name for arg in output_args if not _is_resource(arg)}
    for arg, tensor in zip(output_args, results, strict=True):
        if _is_resource(arg):
            arg.name = unique_node_name(used, _NUMBER_SUFFIX.sub("", arg.name))
        function.ret[arg.name] = names.get(tensor, tensor)


def _is_resource(arg: Any) -> bool:
    """Return True for a resource argument, or the unused placeholder of one in a loop's condition."""
    return proto.dtype_name(arg.type) == "resource" or _UNUSED_ARGUMENT in arg.name


def drop_traced_gradients(library: Any) -> None:
    """Remove references to the gradients of the functions as they were traced."""
    for function in library.function:
        for node in function.node_def:
            if GRADIENT_ATTR in node.attr and node.attr[GRADIENT_ATTR].s.startswith(_CALL_GRADIENT_PREFIX):
                del node.attr[GRADIENT_ATTR]
