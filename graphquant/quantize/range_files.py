"""Files of ranges: AIMET encodings, TensorRT calibration caches, and tensor overrides of onnxruntime's quantizer.

A file is read as a model without edges whose tensors have stored quantization, as in a TFLite file, so that
`transfer_ranges` applies all kinds alike.
"""

from __future__ import annotations

import json
import operator
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphquant.errors import DataError, UsageError
from graphquant.ir import Graph, Model, Op, Output, StoredQuantization, TensorRef
from graphquant.numerics import LARGEST_VALUE, IntType, QParams
from graphquant.quantize.requantize import iterate_quantized_tensors
from graphquant.utils.atomic_files import write_file

if TYPE_CHECKING:
    from graphquant.quantize.rewrite import InsertedPair

MAX_FILE_BYTES = 1 << 28  # largest file of ranges
TENSORRT_HEADER = "TRT-"
TENSORRT_EXPORT_HEADER = "TRT-10000-EntropyCalibration2"
INT8_STEPS = 127  # largest integer of TensorRT's symmetric int8


class NamedRange(NamedTuple):
    """Scale and zero point of a tensor, per tensor or per channel, or its range in real units without a scale."""

    name: str
    dtype: str
    scale: tuple[float, ...] = ()
    zero_point: tuple[int, ...] = ()
    limits: tuple[float, float] | None = None  # smallest and largest value, if there is no scale
    constant: bool = False
    axis: int = 0


def ranges_as_model(ranges: Iterable[NamedRange], path: Path | None) -> Model:
    """Return ranges as a model that `transfer_ranges` takes."""
    model = Model(format="tflite", path=path)
    model.graphs[""] = graph = Graph("", model.graphs)
    for index, entry in enumerate({entry.name: entry for entry in ranges}.values()):
        low, high = (np.array([limit], np.float32) for limit in entry.limits) if entry.limits else (np.empty(0),) * 2
        stored = StoredQuantization(
            index=index,
            sizes=(),
            scale=np.array(entry.scale, np.float32),
            zero_point=np.array(entry.zero_point, np.int64),
            axis=entry.axis,
            low=low.astype(np.float32),
            high=high.astype(np.float32),
        )
        output = Output(entry.name, entry.dtype, None, stored)
        kind = "constant" if entry.constant else "unknown"
        graph.add_op(Op(name=f"{index}", kind=kind, type="", roles=(), outputs=(output,)))
    return model


def ranges_of_model(model: Model) -> Model:
    """Return the learned ranges of a model with quantization ops. Raise a UsageError if it has none."""
    found: dict[tuple[str, str], tuple[bool, QParams]] = {}
    for graph, name, constant, params in iterate_quantized_tensors(model):
        if isinstance(params.type, IntType) and params.block is None:
            found.setdefault((graph, name), (constant, params))  # of several pairs, the one nearest to the producer
    if not found:
        raise UsageError(
            f"{model.path or 'The model'} has no quantization, so it has no ranges. Pass a quantized model, a TFLite"
            " file, AIMET encodings, a TensorRT calibration cache, or tensor overrides of onnxruntime."
        )
    names = _unique_names(model, {key: params for key, (_, params) in found.items()})
    entries = (
        NamedRange(
            name=name,
            dtype=params.type.name,
            scale=tuple(params.scale.reshape(-1).astype(float).tolist()),
            zero_point=tuple(params.zero_point.reshape(-1).tolist()),
            constant=constant,
            axis=params.axis or 0,
        )
        for name, (constant, params) in zip(names, found.values(), strict=True)
    )
    return ranges_as_model(entries, model.path)


def _unique_names(model: Model, ranges: Mapping[tuple[str, str], QParams]) -> Iterator[str]:
    """Yield a name for each range, by graph and tensor: `GRAPH/NAME` if not all tensors of that name have this range.

    Branches and functions may have tensors of one name, each with its own range or none. Raises a UsageError if another
    tensor is called `GRAPH/NAME`.
    """
    counts = Counter(output.name for _, op in model.reachable_ops() for output in op.outputs)
    numbers: dict[str, list[tuple[str, bytes, bytes]]] = defaultdict(list)
    for (_, name), params in ranges.items():
        numbers[name].append((params.type.name, params.scale.tobytes(), params.zero_point.tobytes()))
    written = set[str]()
    for graph, name in ranges:
        is_unique = len({*numbers[name]}) == 1 and len(numbers[name]) >= counts[name]
        qualified = name if is_unique or not graph else f"{graph}/{name}"
        if qualified != name and (qualified in counts or qualified in written):
            raise UsageError(
                f"Two tensors would be called {qualified!r} in the ranges. Rename one of them in the model."
            )
        written.add(qualified)
        yield qualified


def read_range_file(path: Path) -> Model:
    """Read a file of ranges, whose content tells its kind. Raises a DataError if it is none, or damaged."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)  # the size of a device or pipe is unknown before
        if len(content) > MAX_FILE_BYTES:
            raise DataError(f"{path} is over {MAX_FILE_BYTES >> 20} MB, too large for ranges. Use another file.")
        text = content.decode("utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Use the path of a file of ranges.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a file of ranges: it is no text. {_KINDS}") from error
    try:
        entries = list(_parse_tensorrt(text) if text.startswith(TENSORRT_HEADER) else _parse_json(json.loads(text)))
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError, struct.error) as error:
        reason = f"{type(error).__name__}: {str(error)[:100]}"
        raise DataError(f"{path} cannot be understood as a file of ranges ({reason}). {_KINDS}") from error
    if not entries:
        raise DataError(f"{path} has no ranges of integers. {_KINDS}")
    return ranges_as_model(entries, path)


_KINDS = "Use AIMET encodings, a TensorRT calibration cache, or tensor overrides of onnxruntime as JSON."


def _parse_tensorrt(text: str) -> Iterator[NamedRange]:
    """Yield the scales of a calibration cache: lines of a name and the bits of a float32, for symmetric int8."""
    for line in text.splitlines()[1:]:
        name, _, bits = line.rpartition(": ")
        if name:
            (scale,) = struct.unpack(">f", bytes.fromhex(bits.strip().zfill(8)))
            if scale:  # a tensor that was always zero has none
                yield _integer_range(name, "int8", [scale], [0], constant=False)


def _parse_json(content: Any) -> Iterator[NamedRange]:
    """Yield the ranges of AIMET encodings of version 0.6, 1.0 or 2.0, or of tensor overrides."""
    if "activation_encodings" in content or "encodings" in content:
        for key in ("activation_encodings", "param_encodings", "encodings"):
            section = content.get(key, ())
            named = section.items() if isinstance(section, Mapping) else ((entry["name"], entry) for entry in section)
            for name, entry in named:
                yield from _parse_aimet(name, entry, constant=key == "param_encodings")
        return
    for name, overrides in content.items():
        yield from _parse_overrides(name, [overrides] if isinstance(overrides, Mapping) else overrides)


def _parse_aimet(name: str, entry: Any, *, constant: bool) -> Iterator[NamedRange]:
    """Yield the range of an encoding; real = scale * (integer + offset), with integers from 0."""
    if isinstance(entry, list):  # version 0.6 has one encoding for each channel
        channels = [channel for channel in entry if channel.get("dtype", "int") == "int"]
        if not channels:
            return
        bits = int(channels[0]["bitwidth"])
        scale = tuple(float(channel["scale"]) for channel in channels)
        offset = tuple(int(channel["offset"]) for channel in channels)
        signed = str(channels[0].get("is_symmetric")).lower() == "true"
    elif "y_scale" in entry:  # version 2.0
        dtype = entry.get("output_dtype", "int8")
        scales, zeros = np.atleast_1d(entry["y_scale"]), entry.get("y_zero_point")
        stored_zeros = np.zeros(len(scales), int) if zeros is None else np.atleast_1d(zeros)
        yield _integer_range(name, dtype, scales.tolist(), stored_zeros.tolist(), constant=constant)
        return
    else:
        if str(entry.get("dtype", "INT")).upper() != "INT":
            return
        bits, signed = int(entry["bw"]), bool(entry.get("is_sym"))
        scale = tuple(map(float, entry["scale"]))
        offset = tuple(map(int, entry["offset"]))
    # Symmetric encodings have 2**bits or 2**bits - 1 steps, with another offset each, and 0 is always an integer.
    zero_points = [0 if signed else -value for value in offset]
    yield _integer_range(name, f"{'int' if signed else 'uint'}{bits}", scale, zero_points, constant=constant)


def _parse_overrides(name: str, overrides: list[Any]) -> Iterator[NamedRange]:
    """Yield the range of a tensor that onnxruntime's quantizer would override; there is one entry for each channel."""
    if not all("scale" in entry for entry in overrides):
        if len(overrides) == 1 and "rmin" in overrides[0] and "rmax" in overrides[0]:
            limits = float(overrides[0]["rmin"]), float(overrides[0]["rmax"])
            if not -LARGEST_VALUE <= limits[0] <= limits[1] <= LARGEST_VALUE:
                raise ValueError(f"the range of {name} is {limits}")
            yield NamedRange(name=name, dtype="float32", limits=limits)
        return
    if overrides:
        dtype = str(overrides[0].get("quant_type", "QUInt8")).rpartition(".")[2].removeprefix("Q").lower()
        zeros = [int(np.asarray(entry.get("zero_point", 0)).item()) for entry in overrides]
        scales = [float(np.asarray(entry["scale"]).item()) for entry in overrides]
        yield _integer_range(name, dtype, scales, zeros, constant=len(overrides) > 1)


def _integer_range(
    name: str, dtype: str, scale: Iterable[float], zero_point: Iterable[int], *, constant: bool
) -> NamedRange:
    """Return a range of integers. Raise ValueError or TypeError for numbers that the type and float32 do not have."""
    scales, zero_points = tuple(scale), tuple(map(operator.index, zero_point))
    if not scales or len(scales) != len(zero_points):
        raise ValueError(f"{name} has {len(scales)} scales and {len(zero_points)} zero points")
    if not all(0 < value <= LARGEST_VALUE for value in scales):
        raise ValueError(f"a scale of {name} is not positive, or exceeds float32")
    integer = IntType.parse(dtype)
    low, high = integer.limits()
    if not all(low <= value <= high for value in zero_points):
        raise ValueError(f"a zero point of {name} is not from {low} to {high}")
    return NamedRange(name=str(name), dtype=integer.name, scale=scales, zero_point=zero_points, constant=constant)


def check_export_suffix(path: Path) -> None:
    """Raise a UsageError if the suffix selects no kind of file."""
    if path.suffix not in _EXPORTS:
        raise UsageError(f"{path} does not end in {', '.join(_EXPORTS)}, which select the kind of file. Rename it.")


def export_ranges(path: Path, model: Model, pairs: Iterable[InsertedPair]) -> None:
    """Write the ranges of inserted pairs: `.encodings` for AIMET, `.cache` for TensorRT, `.json` for onnxruntime.

    Raises a UsageError if the suffix is another one, or the file cannot be written.
    """
    check_export_suffix(path)
    found: dict[tuple[str, str], tuple[InsertedPair, QParams]] = {}
    for pair in pairs:
        if isinstance(pair.params, QParams) and isinstance(pair.params.type, IntType) and pair.params.block is None:
            tensor = pair.site.tensor
            found.setdefault((tensor.graph, _file_name(model, tensor)), (pair, pair.params))
    names = _unique_names(model, {key: params for key, (_, params) in found.items()})
    ranges = dict(zip(names, found.values(), strict=True))
    content = _EXPORTS[path.suffix](ranges)
    write_file(path, content if isinstance(content, str) else json.dumps(content, indent=2) + "\n")


def _file_name(model: Model, tensor: TensorRef) -> str:
    """Return the name of a tensor in the file of the model."""
    if tensor.graph in model.graphs and tensor.op in model.graphs[tensor.graph]:
        return model.output(tensor).name or str(tensor)
    return tensor.op if not tensor.port else str(tensor)  # a tensor of the prepared model


_Ranges = Mapping[str, tuple["InsertedPair", QParams]]


def _channels(params: QParams) -> list[tuple[float, int]]:
    scale, zero_point = params.scale.reshape(-1).astype(float), params.zero_point.reshape(-1)
    return [(value, int(zero)) for value, zero in zip(scale.tolist(), zero_point.tolist(), strict=True)]


def _aimet_content(ranges: _Ranges) -> dict[str, Any]:
    """Return encodings of version 0.6.1."""
    sections: dict[str, dict[str, Any]] = {"activation_encodings": {}, "param_encodings": {}}
    for name, (pair, params) in ranges.items():
        shift = 1 << (params.type.bits - 1) if params.type.limits()[0] < 0 else 0
        sections["param_encodings" if pair.site.parameter else "activation_encodings"][name] = [
            {
                "bitwidth": params.type.bits,
                "dtype": "int",
                "is_symmetric": str(shift > 0 and not params.zero_point.any()),
                "scale": scale,
                "offset": -zero - shift,
                "min": scale * (params.type.limits()[0] - zero),
                "max": scale * (params.type.limits()[1] - zero),
            }
            for scale, zero in _channels(params)
        ]
    return {"version": "0.6.1", **sections}


def _tensorrt_content(ranges: _Ranges) -> str:
    """Return a calibration cache. TensorRT computes ranges of weights itself, and its int8 is symmetric."""
    lines = [TENSORRT_EXPORT_HEADER]
    for name, (pair, params) in ranges.items():
        if not pair.site.parameter and params.scale.ndim == 0:
            is_exact = params.type.name == "int8" and not params.zero_point.any()
            largest = max(float(-params.range.low), float(params.range.high))
            scale = float(params.scale) if is_exact else largest / INT8_STEPS
            lines.append(f"{name}: {struct.pack('>f', scale).hex()}")
    return "\n".join(lines) + "\n"


def _override_content(ranges: _Ranges) -> dict[str, Any]:
    """Return the TensorQuantOverrides of onnxruntime's quantizer; the types are names of its QuantType."""
    names = {"int": "QInt", "uint": "QUInt"}
    content: dict[str, Any] = {}
    for name, (_, params) in ranges.items():
        prefix = names[params.type.name.rstrip("0123456789")]
        axis = {} if params.axis is None else {"axis": params.axis}
        content[name] = [
            {"quant_type": f"{prefix}{params.type.bits}", "scale": scale, "zero_point": zero, **axis}
            for scale, zero in _channels(params)
        ]
    return content


_EXPORTS: dict[str, Callable[[_Ranges], Any]] = {
    ".encodings": _aimet_content,
    ".cache": _tensorrt_content,
    ".json": _override_content,
}
