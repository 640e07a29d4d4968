"""Inputs of a decoder from token ids alone: masks, positions, and the past states that the model itself computes.

Each sequence of ids gives one sample with its first tokens and empty past states, and then samples of one token, each
with the present states of the sample before. Their `labels` are the next tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphquant import formats
from graphquant.calibration.data.dataset import Dataset, Feed, MemoryData, open_data, split_by_signature
from graphquant.calibration.data.fit import MissingArrayError, numpy_dtype
from graphquant.errors import DataError
from graphquant.ir import TensorRef, find_states, fixed_cache_size
from graphquant.utils.text import format_shape

if TYPE_CHECKING:
    from graphquant.formats import InputSpec
    from graphquant.ir import Graph, Model, Op
    from graphquant.numerics import Array

STEPS = 4  # number of samples of one token after the first tokens of each sequence
ATTENTION_AXES, POSITIONS_AXIS = 4, 2  # of the states of attention: sequences, heads, positions and values of a head
MIN_TOKENS = STEPS + 2  # one token at least comes first, and the last one is only a label
LABELS = "labels"


class _GeneratedData(MemoryData):
    """Samples of a decoder, named by the data spec of their ids."""

    def __init__(self, spec: str | MemoryData, samples: Iterator[Feed]) -> None:
        super().__init__(samples)
        self._spec = spec

    def __str__(self) -> str:
        return str(self._spec)


def complete_decoder_data(model: Model, spec: str | MemoryData) -> str | MemoryData:
    """Return data for all inputs of a decoder if `spec` has token ids and lacks past states; else `spec`.

    Raises a DataError if an input is neither in the data nor a mask, positions or a past state.
    """
    states = {} if split_by_signature(spec) else find_states(model)
    if not states:
        return spec
    inputs = formats.format_module(model.format).input_specs(model)
    if (missing := _missing_array(spec, inputs)) is None:
        return spec
    tokens = (entry for entry in inputs if "int" in entry.dtype and _generated_values(entry, 0, 1) is None)
    ids = next((entry for entry in tokens if _missing_array(spec, [entry]) is None), None)
    if ids is None:
        return spec  # to open it raises the error
    others = [entry for entry in inputs if entry.name not in states and entry is not ids]
    unknown = next((entry for entry in others if _generated_values(entry, 0, 1) is None), None)
    if unknown is not None:
        raise DataError(
            f"{missing} Past states, masks and positions follow from {ids.name!r}, but {unknown.name!r} is none of"
            " them. Provide all inputs."
        )
    masks = [entry for entry in others if "mask" in entry.name.lower() and _missing_array(spec, [ids, entry]) is None]
    names = {tensor: name for name, tensor in formats.create_runner(model).output_tensors.items()}
    presents = {name: names[tensor] for name, tensor in states.items()}
    generator = _SampleGenerator(model, inputs, ids, [mask.name for mask in masks], presents)
    return _GeneratedData(spec, generator.samples(open_data(spec, [ids, *masks], require_finite=False)))


def _missing_array(spec: str | MemoryData, inputs: Sequence[InputSpec]) -> MissingArrayError | None:
    """Return the error that data has no array for one of the inputs, or None."""
    try:
        open_data(spec, inputs, samples=1, require_finite=False)
    except MissingArrayError as error:
        return error
    return None


class _SampleGenerator:
    """Runs a decoder on sequences of ids."""

    def __init__(
        self, model: Model, inputs: Sequence[InputSpec], ids: InputSpec, masks: list[str], presents: Mapping[str, str]
    ) -> None:
        self._runner = formats.create_runner(model)
        self._inputs, self._ids, self._masks = inputs, ids, masks
        self._presents = presents  # name of the output that has the next value, by the name of each state

    def samples(self, sequences: Dataset) -> Iterator[Feed]:
        """Yield the samples of all sequences, with their labels."""
        for index, feed in enumerate(sequences):
            tokens = np.asarray(feed[self._ids.name])
            for mask in self._masks:  # padding is no text
                tokens = tokens[:, (feed[mask].reshape(-1, tokens.shape[1]) != 0).all(0)]
            if tokens.ndim != 2 or tokens.shape[1] < MIN_TOKENS:  # noqa: PLR2004  # batch and tokens
                raise DataError(
                    f"Sequence {index} of {self._ids.name!r} is {format_shape(tokens.shape)}, and at least {MIN_TOKENS}"
                    " tokens are needed to compute past states. Provide longer sequences."
                )
            yield from self._samples_of_sequence(tokens)

    def _samples_of_sequence(self, tokens: Array) -> Iterator[Feed]:
        batch, count = len(tokens), tokens.shape[1] - 1
        # A decoder for one token at a time also reads its first tokens one by one.
        first = 1 if self._ids.shape is not None and self._ids.shape[1:] == (1,) else count - STEPS
        given = [entry for entry in self._inputs if entry.name in self._presents]
        states = {entry.name: _first_state(self._runner.model, entry, batch) for entry in given}
        for start, stop in [(0, first), *((position, position + 1) for position in range(first, count))]:
            feed = {self._ids.name: tokens[:, start:stop], **states}
            for entry in self._inputs:
                values = _generated_values(entry, start, stop - start) if entry.name not in feed else None
                if values is not None:
                    feed[entry.name] = np.repeat(values, batch, axis=0)
            yield {**feed, LABELS: tokens[:, start + 1 : stop + 1].astype(np.int64)}
            if stop < count:
                outputs = self._runner.run(feed)
                states = {name: outputs[present] for name, present in self._presents.items()}


def _first_state(model: Model, state: InputSpec, batch: int) -> Array:
    """Return a past state before the first token: its first axis of unknown size counts sequences.

    Raises a DataError if it has no axis of unknown size for positions.
    """
    graph, shape = model.main, state.shape or ()
    uses = [(graph.op(use.op), use.slot) for use in graph.consumers(TensorRef(graph.name, state.name))]
    reader, slot = next(((op, slot) for op, slot in uses if op.role(slot) == "state"), (None, 0))
    sizes = [batch if size is None else size for size in shape]
    if reader is not None and reader.kind != "attention":
        return np.zeros(sizes, numpy_dtype(state.dtype))  # a convolution or recurrence starts with zeros
    axis = max((axis for axis, size in enumerate(shape) if size is None), default=0)  # of positions
    if reader is not None and len(shape) == ATTENTION_AXES:
        axis, sizes[-1] = POSITIONS_AXIS, shape[-1] or _head_size(graph, reader, slot)
    if shape[axis : axis + 1] != (None,):
        raise DataError(
            f"The past state {state.name!r} is {format_shape(shape)} without an axis that grows, so that it cannot be"
            " empty before the first token. Provide it in the data."
        )
    sizes[axis] = 0 if reader is None else fixed_cache_size(reader)
    return np.zeros(sizes, numpy_dtype(state.dtype))


def _head_size(graph: Graph, attention: Op, slot: int) -> int:
    """Return the size of a head of the keys or values that follow the past state in a slot; 0 if it is unknown."""
    part = 1 + attention.roles[:slot].count("state")
    slots = graph.slots(attention.name)
    source = slots[part] or slots[0]  # queries, keys and values may be one tensor
    shape = (graph.output(source).shape if source is not None else None) or (None,)
    heads = attention.numeric_attr("num_heads", 1)
    kv_heads = attention.numeric_attr("kv_num_heads", heads)
    joined = 1 if len(shape) == ATTENTION_AXES else kv_heads if slots[part] else heads + 2 * kv_heads
    return int((shape[-1] or 0) // max(joined, 1))


def _generated_values(model_input: InputSpec, past: int, count: int) -> Array | None:
    """Return the values of an input for `count` tokens after `past` others, which its name tells.

    None for another name. The models of all exporters have these names, on which their users rely.
    """
    name, dtype = model_input.name.lower(), numpy_dtype(model_input.dtype)
    if "mask" in name:
        return np.ones((1, past + count), dtype)
    if "position" in name:
        return np.arange(past, past + count, dtype=dtype)[None]
    return np.zeros((1, count), dtype) if "token_type" in name else None
