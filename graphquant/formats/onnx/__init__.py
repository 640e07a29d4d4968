"""ONNX models: read, written, run and raised to a newer opset.

onnx and onnxruntime are imported when they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from graphquant.formats import Feeds, InputSpec, OpProfile, Runner
    from graphquant.ir import Model


__all__ = [
    "DEFAULT_RULES",
    "DEFAULT_FAMILY",
    "emit",
    "inline_functions",
    "load",
    "create_runner",
    "save",
    "encode_skeleton",
    "profile_ops",
    "prepare_timed_run",
    "upgrade_opset",
]

DEFAULT_RULES = "onnxruntime"
DEFAULT_FAMILY = "onnx-qdq"


def load(path: Path) -> Model:
    """Reads the model at `path`: `.onnx`, `.onnxtxt`, `.textproto` or `.json`; external data stays where it is.

    Raises:
        ModelError: The file is no ONNX model, or what it holds does not fit together.
    """
    from graphquant.formats.onnx.reader import load_onnx_file as read

    return read(path)


def emit(model: Model) -> Any:
    """The changed copy of the source, an `onnx.ModelProto`.

    Raises:
        ModelError: A change cannot be said in ONNX.
    """
    from graphquant.formats.onnx.emitter import emit_message as write
    from graphquant.formats.onnx.source import write_onnx_metadata

    message = write(model).message
    write_onnx_metadata(message, model)
    return message


def save(model: Model, path: Path) -> None:
    """Emits the model and writes it to `path`, whole or not at all, with links to its external data in a new folder.

    Where the message would come to over 2 GB, or the source has its weights outside and there are many new ones, all go
    to one file beside it, `NAME.onnx.DIGEST.data`, which is there before the model is; that of a replaced model goes.

    Raises:
        ModelError: A change cannot be said in ONNX, or a textual form would be over 2 GB.
        UsageError: `path` cannot be written.
    """
    from graphquant.formats.onnx.file_writer import save_onnx_file as write

    write(model, path)


def input_specs(model: Model) -> Sequence[InputSpec]:
    """The graph's inputs without a default value."""
    from graphquant.formats import InputSpec

    required_ops = [op for op in map(model.main.op, model.main.inputs) if op.read_value is None]
    return [
        InputSpec(name=op.name, dtype=op.outputs[0].dtype or "unknown", shape=op.outputs[0].shape)
        for op in required_ops
    ]


def create_runner(model: Model) -> Runner:
    """An onnxruntime session for the model, made when it is first run.

    Raises:
        ModelError: The model cannot be emitted.
    """
    from graphquant.formats.onnx.session import OnnxRunner

    return OnnxRunner(model)


def prepare_timed_run(model: Model, feeds: Sequence[Feeds]) -> Callable[[], object]:
    """What runs the model once on each of `feeds`, in a session of its own on one thread.

    Raises:
        ModelError: onnxruntime cannot take the model, or a run failed.
    """
    from graphquant.formats.onnx.session import start_timed_session as started

    return started(model, feeds)


def profile_ops(model: Model, feeds: Sequence[Feeds]) -> OpProfile:
    """Seconds that each op takes in such a run.

    Raises:
        ModelError: onnxruntime cannot take the model, or a run failed.
    """
    from graphquant.formats.onnx.session import profile_session_ops as profiled

    return profiled(model, feeds)


def upgrade_opset(model: Model, opset: int) -> Model:
    """The model at `opset` of the default domain, checked to run and to give the same outputs.

    Raises:
        ModelError: That cannot be done.
    """
    from graphquant.formats.onnx.opset_upgrade import convert_opset as convert

    return convert(model, opset)


def inline_functions(model: Model) -> tuple[Model, dict[tuple[str, str], tuple[str, str]]]:
    """The model with its functions put in place of their calls, and for each op of that the one it is a copy of.

    Raises:
        ModelError: The model cannot be emitted.
    """
    from graphquant.formats.onnx.inline_functions import inline_model_functions as flat

    return flat(model)


def read_metadata(model: Model) -> dict[str, str]:
    """What the model says of where it came from."""
    from graphquant.formats.onnx.source import metadata_entries as read

    return read(model.source.message)


def restore_original(model: Model) -> tuple[Model, bool] | None:
    """The model that the record in this one gives back; see `FormatModule`.

    Raises:
        ModelError: The record is damaged, or weights were changed.
    """
    from graphquant.formats.onnx.reader import model_from_message
    from graphquant.formats.onnx.source import restore_source_message

    restoration = restore_source_message(model.source.message)
    return None if restoration is None else (model_from_message(restoration[0], path=model.path), restoration[1])


def encode_skeleton(model: Model) -> str:
    """The source message without the data of its weights, as text: what taking an upgrade back needs."""
    from graphquant.formats.onnx.opset_upgrade import encode_weightless_message as bare

    return bare(model)
