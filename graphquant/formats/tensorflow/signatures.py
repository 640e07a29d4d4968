"""Signatures of a SavedModel or MetaGraph: the ones that run, their inputs and the data for them, their outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from graphquant.errors import ModelError, UsageError, did_you_mean
from graphquant.formats import InputSpec
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.values import decode_shape
from graphquant.ir import TensorRef

if TYPE_CHECKING:
    from graphquant.ir import Graph, Model, Shape
    from graphquant.numerics import Array

INIT_SIGNATURE: Final = "__saved_model_init_op"
_SPARSE_PARTS: Final = ("", "_1", "_2")
"""Suffixes of the keys under which TensorFlow 2 saves the indices, the values and the shape of a sparse argument."""


class FedTensors(NamedTuple):
    """The placeholders of one input: one of a dense tensor, or several of a sparse or a ragged one."""

    encoding: Literal["dense", "sparse", "ragged"]
    # The op of a dense tensor; indices, values and shape of a sparse one; values and row splits of a ragged one.
    ops: tuple[str, ...]

    @property
    def values_op(self) -> str:
        """The placeholder of the values."""
        return self.ops[1] if self.encoding == "sparse" else self.ops[0]

    def encode(self, array: Array) -> dict[str, Array]:
        """Return the value of each placeholder for a dense array of samples.

        Zeros and empty strings are the missing values of a sparse tensor. All rows of a ragged tensor get the length
        that they have in the array.
        """
        if self.encoding == "dense":
            return {self.ops[0]: array}
        if self.encoding == "sparse":
            is_text = array.dtype.kind in "OSU"
            present = np.vectorize(len, otypes=[bool])(array) if is_text and array.size else array.astype(bool)
            parts = np.argwhere(present), array[present], np.array(array.shape, np.int64)
            return dict(zip(self.ops, parts, strict=True))
        depth = len(self.ops)  # axes with row splits, and the batch axis
        splits = [
            np.arange(int(np.prod(array.shape[:axis])) + 1, dtype=np.int64) * array.shape[axis]
            for axis in range(1, depth)
        ]
        flat_values = array.reshape(-1, *array.shape[depth:])
        return dict(zip(self.ops, (flat_values, *splits), strict=True))


class SignatureInput(NamedTuple):
    """An input that data feeds, and the tensors that receive it: one in each signature that takes it."""

    spec: InputSpec
    targets: tuple[FedTensors, ...]


def signatures_with_outputs(meta: Any) -> Iterator[str]:
    """Yield the names of signatures with outputs, `serving_default` first."""
    for name in dict.fromkeys(["serving_default", *sorted(meta.signature_def)]):
        outputs = meta.signature_def[name].outputs if name in meta.signature_def and name != INIT_SIGNATURE else {}
        if any(info.name for info in outputs.values()):
            yield name


def output_tensors(signature: Any) -> dict[str, str]:
    """Return the tensor of each output of a SignatureDef that is one tensor."""
    names = {key: signature.outputs[key].name for key in sorted(signature.outputs)}
    return {key: name if ":" in name else f"{name}:0" for key, name in names.items() if name}


def running_signatures(model: Model, meta: Any) -> tuple[str, ...]:
    """Return the names of the signatures that run: the selected ones, or the first and all that its data can feed."""
    if model.source.selected_signatures:
        return tuple(model.source.selected_signatures)
    first, *others = [*signatures_with_outputs(meta)] or [""]
    if not first:
        return ()
    known = _inputs_of(model, first, meta.signature_def[first])
    inputs = {name: _inputs_of(model, name, meta.signature_def[name]) for name in others}
    return (first, *(name for name in others if all(_find_equal(entry, known) is not None for entry in inputs[name])))


def signature_inputs(model: Model, meta: Any) -> tuple[SignatureInput, ...]:
    """Return the inputs of the signatures that run. Signatures share an input of the same key, type and shape."""
    merged: list[SignatureInput] = []
    for name in running_signatures(model, meta):
        for entry in _inputs_of(model, name, meta.signature_def[name]):
            index = None if model.source.separate_inputs else _find_equal(entry, merged)
            if index is None:
                merged.append(entry)
            else:
                shared = merged[index]
                spec = replace(shared.spec, signatures=(*shared.spec.signatures, name))
                targets = tuple(dict.fromkeys((*shared.targets, *entry.targets)))
                merged[index] = shared._replace(spec=spec, targets=targets)
    return tuple(merged)


def signature_placeholders(model: Model, name: str, signature: Any) -> dict[str, str]:
    """Return the placeholder of each input of a signature that data feeds, by its key."""
    specs = [entry.spec for entry in _inputs_of(model, name, signature)]
    return {next((alias for alias in spec.aliases if ":" not in alias), spec.name): spec.name for spec in specs}


def _find_equal(entry: SignatureInput, others: Sequence[SignatureInput]) -> int | None:
    """Return the index of the input in `others` whose data `entry` accepts; None if there is none."""
    for index, other in enumerate(others):
        if entry.targets[0] in other.targets:
            return index
        has_same_key = entry.spec.aliases[-1:] == other.spec.aliases[-1:]
        encodings = (entry.targets[0].encoding, entry.spec.dtype), (other.targets[0].encoding, other.spec.dtype)
        if has_same_key and encodings[0] == encodings[1] and _accepts_shape(entry.spec.shape, other.spec.shape):
            return index
    return None


def _accepts_shape(shape: Shape | None, other: Shape | None) -> bool:
    """Return True if an input of `shape` takes each array that an input of the shape `other` takes."""
    if shape is None or other is None:
        return shape is None
    return len(shape) == len(other) and all(size in {None, known} for size, known in zip(shape, other, strict=True))


def signature_outputs(model: Model, meta: Any) -> dict[str, str]:
    """Return the tensors of the outputs of all signatures that run, each once.

    The outputs of the first signature are named by their keys, and those of others are named "SIGNATURE/KEY".
    """
    first, *others = running_signatures(model, meta)
    fetches = output_tensors(meta.signature_def[first])
    for name in others:
        for key, tensor in output_tensors(meta.signature_def[name]).items():
            if tensor not in fetches.values():
                fetches[f"{name}/{key}"] = tensor
    return fetches


def _inputs_of(model: Model, name: str, signature: Any) -> list[SignatureInput]:
    """Return the inputs of a signature. Tensors that the graph computes from other inputs need no data."""
    inputs: list[SignatureInput] = []
    part_keys: set[str] = set()
    for key in sorted(signature.inputs):
        if key in part_keys:
            continue
        is_sparse = _is_sparse(signature, key)
        splits = () if is_sparse else _row_split_keys(model, signature, key)
        part_keys.update((f"{key}{part}" for part in _SPARSE_PARTS) if is_sparse else splits)
        tensors, info = _fed_tensors(model.main, signature, key, splits), signature.inputs[key]
        values_op = tensors.values_op
        if model.main.op(values_op).kind != "input" or model.main.slots(values_op):  # no placeholder
            continue
        values = model.main.op(values_op).outputs[0]
        names = (f"{values_op}:0", key) if tensors.encoding == "dense" else (key,)
        spec = InputSpec(
            name=values_op,
            dtype=values.dtype or "float32",
            shape=values.shape if tensors.encoding == "dense" else _composite_shape(model.main, tensors, info),
            aliases=tuple(dict.fromkeys(alias for alias in names if alias != values_op)),
            signatures=(name,),
        )
        inputs.append(SignatureInput(spec=spec, targets=(tensors,)))
    return inputs


def _is_sparse(signature: Any, key: str) -> bool:
    """Return True if `key` and the two keys after it are the parts of a sparse argument, as TensorFlow 2 saves them."""
    parts = [signature.inputs[f"{key}{part}"] for part in _SPARSE_PARTS if f"{key}{part}" in signature.inputs]
    if len(parts) != len(_SPARSE_PARTS) or not all(part.name for part in parts):
        return False
    indices, values, shape = (decode_shape(part.tensor_shape) for part in parts)
    are_integers = all(proto.dtype_name(part.dtype) == "int64" for part in (parts[0], parts[2]))
    ranks = [None if sizes is None else len(sizes) for sizes in (indices, values, shape)]
    return (
        are_integers and ranks == [2, 1, 1] and indices is not None and None not in indices[1:] and indices[1:] == shape
    )


def _row_split_keys(model: Model, signature: Any, key: str) -> tuple[str, ...]:
    """Return the keys of the row splits of a ragged argument, which TensorFlow 2 saves after its values; else none."""
    keys: list[str] = []
    while (name := f"{key}_{len(keys) + 1}") in signature.inputs and _are_row_splits(model, signature.inputs[name]):
        keys.append(name)
    return tuple(keys)


def _are_row_splits(model: Model, info: Any) -> bool:
    """Return True if an input is a vector of int64 that an op of ragged tensors reads, also in a called function."""
    shape, name = decode_shape(info.tensor_shape), info.name.partition(":")[0]
    is_vector = proto.dtype_name(info.dtype) == "int64" and shape is not None and len(shape) == 1
    pending = [TensorRef("", name)] if is_vector and name in model.main else []
    for tensor in pending:
        for use in model.graphs[tensor.graph].consumers(tensor):
            op = model.graphs[use.graph].op(use.op)
            if op.type.startswith("Ragged"):
                return True
            forwarded = [TensorRef(use.graph, use.op)] if op.kind == "identity" else []
            for call in op.calls:
                inputs = model.graphs[call.graph].inputs
                position = -1 if call.offset is None else use.slot - call.offset
                forwarded += [TensorRef(call.graph, inputs[position])] if 0 <= position < len(inputs) else []
            pending += [successor for successor in forwarded if successor not in pending]
    return False


def _fed_tensors(main: Graph, signature: Any, key: str, splits: Sequence[str]) -> FedTensors:
    """Return the placeholders of an input with these keys of row splits; raise ModelError if one does not exist."""
    info = signature.inputs[key]
    encoding: Literal["dense", "sparse", "ragged"] = "dense"
    names = [info.name]
    if info.WhichOneof("encoding") == "coo_sparse":
        sparse = info.coo_sparse
        encoding = "sparse"
        names = [sparse.indices_tensor_name, sparse.values_tensor_name, sparse.dense_shape_tensor_name]
    elif info.WhichOneof("encoding") == "composite_tensor":
        kind = proto.TypeSpecProto.TypeSpecClass.Name(info.composite_tensor.type_spec.type_spec_class)
        if kind not in {"SPARSE_TENSOR_SPEC", "RAGGED_TENSOR_SPEC"}:
            raise ModelError(
                f"The signature's input {key!r} is a composite tensor of the kind {kind}. Only sparse and ragged"
                " tensors can be fed; save the model with a signature that takes dense tensors."
            )
        encoding = "sparse" if kind == "SPARSE_TENSOR_SPEC" else "ragged"
        names = [component.name for component in info.composite_tensor.components]
    elif _is_sparse(signature, key):
        encoding = "sparse"
        names = [signature.inputs[f"{key}{part}"].name for part in _SPARSE_PARTS]
    elif splits:
        encoding = "ragged"
        names += [signature.inputs[name].name for name in splits]
    ops = tuple(name.partition(":")[0] for name in names)
    for op in ops:
        if op not in main or not main.op(op).outputs:
            raise ModelError(f"The signature's input {key!r} is {op!r}, which does not exist. The model is damaged.")
    return FedTensors(encoding=encoding, ops=ops)


def _composite_shape(main: Graph, tensors: FedTensors, info: Any) -> Shape | None:
    """Return the shape of the dense array that feeds a sparse or ragged input."""
    if tensors.encoding == "ragged":
        flat_shape = main.op(tensors.values_op).outputs[0].shape
        return (None,) * len(tensors.ops) + (() if flat_shape is None else flat_shape[1:])
    if info.WhichOneof("encoding") == "coo_sparse":
        return decode_shape(info.tensor_shape)
    indices = main.op(tensors.ops[0]).outputs[0].shape
    rank = None if indices is None else indices[-1]
    return None if rank is None else (None,) * rank


def select_signatures(model: Model, names: Sequence[str], *, separate_inputs: bool = False) -> Model:
    """Return the model with only the outputs of the signatures `names`, which alone run.

    With `separate_inputs`, each has its own data, also where they take inputs of the same key.

    Raises a UsageError if the model has no such signature, or was frozen with others or without separate inputs.
    """
    meta = model.source.meta_graph(model.source.message)
    frozen = tuple(signature.name for signature in model.source.signatures)
    known = frozen if meta is None else tuple(signatures_with_outputs(meta))
    for name in names:
        if name not in known:
            listed = f"Its signatures are {', '.join(map(repr, known))}" if known else "It has no signatures"
            raise UsageError(
                f"{model.path or 'The model'} has no signature {name!r}. {listed}.{did_you_mean(name, known)}"
            )
    if frozen:
        inputs = [op for signature in model.source.signatures for op in set(signature.inputs.values())]
        if set(names) != set(frozen) or (separate_inputs and len(set(inputs)) < len(inputs)):
            raise UsageError(
                f"{model.path or 'The model'} was frozen with the signatures {', '.join(frozen)}, and their inputs of"
                " the same key, type and shape are one. Give one array for each input, or freeze only the signature"
                " that you need: gq.freeze(gq.load(PATH, signature=NAME))."
            )
        return model
    kept = {tensor for name in names for tensor in output_tensors(meta.signature_def[name]).values()}
    selected = model.copy()
    selected.provenance, selected.original_model = model.provenance, model.original_model
    selected.source = replace(
        model.source, selected_signatures=tuple(dict.fromkeys(names)), separate_inputs=separate_inputs
    )
    main = selected.main
    main.outputs = [label for label in main.outputs if main.op(label).attrs.get("tensor") in kept]
    return selected


def choose_meta_graph(meta_graphs: Sequence[Any], tags: Sequence[str], file: object) -> int:
    """Return the index of the MetaGraph with exactly these tags.

    Without tags, it is the one tagged `serve` with the fewest other tags, else the first. The empty tag stands for no
    tags. Raises a UsageError if there is none.
    """
    tag_sets = [tuple(meta.meta_info_def.tags) for meta in meta_graphs]
    if not tags:
        serving = [index for index, names in enumerate(tag_sets) if "serve" in names]
        return min(serving, key=lambda index: len(tag_sets[index]), default=0)
    index = next((index for index, names in enumerate(tag_sets) if set(names) == set(filter(None, tags))), None)
    if index is None:
        listed = "; ".join(format_tags(names) for names in tag_sets) or "none"
        named = f"the tags {','.join(tags)}" if any(tags) else "no tags"
        raise UsageError(f"{file} has no MetaGraph with {named}. Its MetaGraphs have: {listed}.")
    return index


def format_tags(names: Sequence[str]) -> str:
    """Return the tags of a MetaGraph as `--tags` takes them."""
    return ",".join(names) or "no tags"


def omission_notes(model: Model) -> list[str]:
    """Return a note for the MetaGraphs of the file that stay as they are, and for signatures without data."""
    source = model.source
    if source.message_type != "SavedModel":
        return []
    metas, notes = list(source.message.meta_graphs), []
    others = [format_tags(tuple(meta.meta_info_def.tags)) for index, meta in enumerate(metas) if index != source.index]
    if others:
        notes.append(
            f"only the MetaGraph {format_tags(tuple(metas[source.index].meta_info_def.tags))} is quantized. The file"
            f" also has {'; '.join(others)}; --tags chooses one."
        )
    meta = metas[source.index]
    if source.selected_signatures or not any(signatures_with_outputs(meta)):
        return notes
    running = running_signatures(model, meta)
    idle = [name for name in signatures_with_outputs(meta) if name not in running]
    if idle:
        names = (running[0], *idle)
        notes.append(
            f"no data reaches the signature {', '.join(idle)}, because it takes other inputs than {running[0]}. Give"
            f" data for each, --data {','.join(f'{name}=DATA' for name in names)}, or choose with --signature."
        )
    return notes
