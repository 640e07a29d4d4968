"""Mutations of models, data, statistics, plans and rule files of every format, for `mutated_inputs.py`."""

from __future__ import annotations

import json
import zipfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Callable


def chance(rng: random.Random, probability: float) -> bool:
    """Return True with the probability."""
    return rng.random() < probability


def mutate_file(rng: random.Random, path: Path) -> str:
    """Mutate a file or a file of a folder, and return the kind of the mutation."""
    if path.is_dir():
        parts = [path / "saved_model.pb", *path.glob("variables/*")]
        path = rng.choice([parts[0], parts[0], *parts])
    weights = path.with_name("weights.bin")
    if path.suffix == ".onnx" and weights.exists() and chance(rng, 0.3):
        return mutate_data_file(rng, weights)
    mutators: dict[str, Callable[[random.Random, Path], object]] = {
        ".onnx": mutate_onnx, ".pb": mutate_tensorflow, ".pbtxt": mutate_tensorflow, ".meta": mutate_tensorflow,
        ".npz": mutate_arrays, ".gqs": partial(mutate_archive, member="header.json"),
        ".keras": partial(mutate_archive, member="config.json"), ".json": mutate_json_file,
        ".toml": mutate_lines, ".onnxtxt": mutate_lines, ".textproto": mutate_lines, ".tflite": mutate_words,
    }  # fmt: skip
    mutator = mutators.get(path.suffix)
    if mutator is None or chance(rng, 0.25):
        mutate_bytes(rng, path)
        return f"bytes of {path.suffix}"
    try:
        mutator(rng, path)
    except (ValueError, IndexError):  # an earlier mutation broke or removed the part that is to be changed
        mutate_bytes(rng, path)
    return f"{getattr(mutator, '__name__', 'mutate_archive').removeprefix('mutate_')} of {path.suffix}"


def mutate_bytes(rng: random.Random, path: Path) -> None:
    """Flip bits, or truncate or splice the bytes."""
    from test_fuzz import BYTES

    path.write_bytes(bytes(rng.choice(BYTES)(rng, path.read_bytes())))


def mutate_data_file(rng: random.Random, path: Path) -> str:
    """Mutate, truncate or delete external weights."""
    if chance(rng, 0.2):
        path.unlink()
        return "missing weights"
    mutate_bytes(rng, path)
    return "bytes of weights"


def mutate_onnx(rng: random.Random, path: Path) -> None:
    """Change fields of an ONNX message, or its initializers, edges, opsets, shapes and types."""
    import onnx
    from test_fuzz import mutate_message, serialize

    message = onnx.ModelProto.FromString(path.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if chance(rng, 0.4) or not mutate_onnx_part(rng, message):  # the rest are parts that random fields rarely hit
            mutate_message(rng, message, rng.choice((1, 1, 2, 8)))
    with suppress(ValueError):  # text that is no UTF-8 cannot be serialized
        path.write_bytes(serialize(message))


TENSOR_TYPE, TENSOR_VALUES, EDGE, OPSET, SHAPE, OP_TYPE, NAME = range(7)


def mutate_onnx_part(rng: random.Random, message: Any) -> bool:
    """Change an initializer, an op, an opset, or a shape or type; return False if the model has none."""
    from onnx import helper

    part = rng.randrange(7)
    graphs = [message.graph, *(a.g for node in message.graph.node for a in node.attribute if a.HasField("g"))]
    graph = rng.choice(graphs)
    nodes, tensors = list(graph.node), list(graph.initializer)
    values = [*graph.input, *graph.output, *graph.value_info]
    if part in {TENSOR_TYPE, TENSOR_VALUES} and tensors:
        mutate_tensor(rng, part, rng.choice(tensors))
    elif part in {EDGE, OP_TYPE, NAME} and nodes:
        mutate_nodes(rng, part, nodes, tensors)
    elif part == OPSET:
        if message.opset_import and chance(rng, 0.7):
            rng.choice(message.opset_import).version = rng.choice((0, 1, 6, 7, 9, 11, 13, 17, 19, 21, 24, 28, 99))
        else:
            message.ir_version = rng.choice((0, 3, 4, 8, 10, 13, 99))
    elif part == SHAPE and values:
        value = rng.choice(values)
        value.type.tensor_type.elem_type = rng.choice((1, 1, 1, rng.randrange(24)))
        dims = rng.choice(([], [None], [0], [3], [1, 8, 8, 1], ["n", "n"], [1 << 33], [2, 3, 8, 8]))
        value.CopyFrom(helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, dims))
    else:
        return False
    return True


def mutate_tensor(rng: random.Random, part: int, tensor: Any) -> None:
    """Change type and shape, or the values, of an initializer."""
    from onnx import TensorProto, numpy_helper

    if part == TENSOR_TYPE:
        tensor.data_type = rng.choice((tensor.data_type, tensor.data_type, rng.randrange(24)))
        if chance(rng, 0.5):
            tensor.dims[:] = rng.choice(([], [0], [-1], [1 << 40], [*tensor.dims, 1], list(tensor.dims)[::-1]))
    elif tensor.data_type == TensorProto.FLOAT and not tensor.external_data:
        array = numpy_helper.to_array(tensor).copy()
        array[...] = rng.choice((0, 1e38, float("nan"), -1, 1e-40, 65504)) if chance(rng, 0.5) else array * 1e4
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def mutate_nodes(rng: random.Random, part: int, nodes: list[Any], tensors: list[Any]) -> None:
    """Change an edge, an op type with the attributes of another op, or a name everywhere."""
    from test_fuzz import WORDS

    names = sorted({name for node in nodes for name in (*node.input, *node.output)} | {t.name for t in tensors})
    if part == NAME:
        old, new = rng.choice(names or [""]), rng.choice([*names, *WORDS])
        for node in nodes:
            node.input[:] = [new if name == old else name for name in node.input]
            node.output[:] = [new if name == old else name for name in node.output]
        return
    node = rng.choice(nodes)
    if part == EDGE and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice([*names, ""])
    elif part == OP_TYPE:
        types = [other.op_type for other in nodes]
        node.op_type = rng.choice([*types, "Relu", "Conv", "Loop", "Scan", "DequantizeLinear"])
        if chance(rng, 0.3):
            node.attribute.extend(list(rng.choice(nodes).attribute))


def mutate_tensorflow(rng: random.Random, path: Path) -> None:
    """Change fields of a GraphDef, MetaGraphDef or SavedModel, or edges and attributes of its nodes."""
    from test_fuzz import mutate_file_message, mutate_message, serialize

    from graphquant.formats.tensorflow import proto

    kinds = {".meta": proto.MetaGraphDef, ".pbtxt": proto.GraphDef}
    kind: Any = kinds.get(path.suffix, proto.SavedModel if path.name == "saved_model.pb" else proto.GraphDef)
    if path.suffix == ".pbtxt" or chance(rng, 0.5):
        mutate_file_message(rng, path, kind)
        return
    message = kind.FromString(path.read_bytes())
    metas = list(message.meta_graphs) if kind is proto.SavedModel else [message]
    graph = getattr(metas[0], "graph_def", metas[0])
    lists = [graph.node, *(function.node_def for function in graph.library.function)]
    nodes = list(rng.choice([nodes for nodes in lists if nodes]))
    node = rng.choice(nodes)
    action = rng.choice((EDGE, TENSOR_TYPE, OP_TYPE, NAME))
    if action == EDGE and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice(nodes).name + rng.choice(("", ":0", ":1", ":output:0"))
    elif action == TENSOR_TYPE and node.attr:
        mutate_message(rng, node.attr[rng.choice(sorted(node.attr))], 1)
    elif action == OP_TYPE:
        node.op = rng.choice(nodes).op
    else:
        node.name = rng.choice(nodes).name
    with suppress(ValueError):
        path.write_bytes(serialize(message))


def mutate_arrays(rng: random.Random, path: Path) -> None:
    """Change names, types, shapes and values of the arrays."""
    import numpy as np

    with np.load(path) as file:
        arrays = dict(file)
    key = rng.choice(sorted(arrays))
    array = arrays.pop(key)
    changes: list[Callable[[], Any]] = [
        lambda: array.astype(rng.choice(("int32", "uint8", "float64", "float16", "bool", "complex64", "U3", "O"))),
        lambda: array[:0], lambda: array[:1], lambda: array[0], lambda: array.T, lambda: array.reshape(-1),
        lambda: array[..., None], lambda: array * np.float32(rng.choice((0, 1e38, 255, -1, 1e-30))),
        lambda: np.where(np.arange(array.size).reshape(array.shape) % 7, array, rng.choice((np.nan, np.inf))),
        lambda: np.concatenate([array] * 3, rng.randrange(array.ndim)), lambda: np.float32(3), lambda: array[:, ::2],
    ]  # fmt: skip
    action = rng.randrange(6)
    if action == 0:
        key = rng.choice(("", "x", "image", "label", "labels", "../a", "x" * 300, "position 1", "files"))
    arrays[key] = rng.choice(changes)() if action else array
    if action == 1:
        arrays["labels"] = np.arange(rng.randrange(20))
    np.savez(path, **arrays)


def mutate_archive(rng: random.Random, path: Path, member: str) -> None:
    """Change the JSON member or the bytes of another member of a zip archive."""
    from test_fuzz import BYTES, mutate_json

    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    if chance(rng, 0.7):
        data = json.loads(content[member])
        for _ in range(rng.choice((1, 1, 2, 4))):
            mutate_json(rng, data)
        content[member] = json.dumps(data).encode()
    else:
        name = rng.choice(sorted(content))
        content[name] = bytes(rng.choice(BYTES)(rng, content[name])) if chance(rng, 0.8) else b""
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in content.items():
            archive.writestr(name, part)


def mutate_json_file(rng: random.Random, path: Path) -> None:
    """Change values of a JSON file."""
    from test_fuzz import mutate_json

    data = json.loads(path.read_text())
    for _ in range(rng.choice((1, 1, 2, 5))):
        mutate_json(rng, data)
    path.write_text(json.dumps(data))


DELETE, REPEAT, SWAP, VALUE, KEY = range(5)

VALUES = (
    '""', '"x"', "-1", "1e400", "nan", "[]", "{}", "true", '"**"', '"/(/"', "99999999999999999999", "[1, 2]",
    '"../../x"', '"{stem}{x}"', '"int3"', '"percentile(200)"', "'''", "=", "[", '"10ZB"', '"a > b > c"',
)  # fmt: skip


def mutate_lines(rng: random.Random, path: Path) -> None:
    """Delete, repeat, swap or change lines of a text file."""
    lines = path.read_text().split("\n")
    for _ in range(rng.choice((1, 1, 2, 4))):
        index, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        filled = [number for number, line in enumerate(lines) if "=" in line or ":" in line] or [index]
        action = rng.randrange(5)
        if action == DELETE and len(lines) > 1:
            del lines[index]
        elif action == REPEAT:
            lines.insert(index, lines[other])
        elif action == SWAP:
            lines[index], lines[other] = lines[other], lines[index]
        else:
            index = rng.choice(filled)
            separator = "=" if "=" in lines[index] else ":"
            head, _, tail = lines[index].partition(separator)
            tail = f" {rng.choice(VALUES)}" if action == VALUE else tail
            key = rng.choice(lines).partition(separator)[0] if action == KEY else head
            lines[index] = f"{key}{separator}{tail}"
    path.write_text("\n".join(lines))


def mutate_words(rng: random.Random, path: Path) -> None:
    """Change 32-bit words of a FlatBuffer, which are offsets, sizes and numbers."""
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 8))):
        position = rng.randrange(len(data) // 4) * 4
        old = int.from_bytes(data[position : position + 4], "little")
        new = rng.choice((0, 1, 4, 255, 1 << 31, (1 << 32) - 1, old + 1, old - 1, old * 2, len(data)))
        data[position : position + 4] = (new % (1 << 32)).to_bytes(4, "little")
    path.write_bytes(data)
