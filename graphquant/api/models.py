"""Models come in and go out: load and save."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant import formats
from graphquant.errors import UsageError
from graphquant.ir import Model
from graphquant.ir import check_invariants as _check_graphs

if TYPE_CHECKING:
    from collections.abc import Sequence


# Where a result may be written: names by default, and what is refused before any work is done.


def default_output(path: Path) -> Path:
    """`model.onnx` to `model.quant.onnx`, the SavedModel `net/` to `net.quant/`, and `net.keras` to `net.quant/`."""
    if path.suffix in formats.KERAS_SUFFIXES:
        return path.with_suffix(".quant")
    if path.is_dir():
        resolved = path if path.name not in {"", ".."} else path.resolve()
        return resolved.parent / f"{resolved.name}.quant"
    return path.with_name(f"{path.stem}.quant{path.suffix}")


def check_model_output(path: Path, source: Path | None, model_format: str, *, force: bool = False) -> None:
    """Refuses an output that the model at `source`, of format `model_format`, cannot be written to, before any work is done.

    Raises:
        UsageError: The name is not one of that format's, or what `check_output` says.
    """
    is_keras = source is not None and source.suffix in formats.KERAS_SUFFIXES
    is_folder = is_keras or (source is not None and source.is_dir())
    check_output(path, source, force=force, folder=is_folder)
    suffixes = [
        suffix
        for suffix, name in formats.SUFFIXES.items()
        if name == model_format and suffix not in formats.KERAS_SUFFIXES
    ]
    if is_keras and path.suffix in formats.KERAS_SUFFIXES:
        raise UsageError(
            f"{path} is named like a Keras file, which holds layers and no ops. The result is a SavedModel: give the"
            f" name of a folder, {path.with_suffix('')}; keras.layers.TFSMLayer puts it into a Keras model."
        )
    if is_folder:
        if path.suffix in formats.SUFFIXES:
            raise UsageError(
                f"{path} is named like a file, and a SavedModel is written as a folder."
                f" Leave {path.suffix!r} out of the name."
            )
    elif path.suffix not in suffixes:
        if path.suffix == ".tflite":
            raise UsageError(
                f"{path} is named like a TFLite file, which is made of a TensorFlow model by TensorFlow's converter,"
                f" and the model is {source or 'of another format'}. Give {path.with_suffix(suffixes[0])}, or insert"
                " into the TensorFlow model that it was made from."
            )
        suffix_text = f"the suffix {path.suffix!r}" if path.suffix else "no suffix"
        raise UsageError(
            f"{path} has {suffix_text}, and the model is written in its own format. Give it one of {', '.join(suffixes)}."
        )


def check_output(path: Path, source: Path | None = None, *, force: bool = False, folder: bool = False) -> None:
    """Refuses an output that cannot or must not be written, before any work is done.

    Args:
        path: The output.
        source: The model, which stays as it is.
        force: Whether what is at `path` may be replaced.
        folder: Whether a folder will be written.

    Raises:
        UsageError: The folder is missing or read-only, the source would be lost, or something is there already.
    """
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise UsageError(f"{path} is the model itself. Give another output with -o; the source is never overwritten.")
    if source is not None and source.is_dir() and source.resolve() in path.resolve().parents:
        raise UsageError(
            f"{path} is inside the model's own folder. Give an output elsewhere; the source is not changed."
        )
    if path.is_symlink():  # it would be replaced, not what it leads to: /dev/stdout is one
        raise UsageError(f"{path} is a link. Give the path that it leads to, or another output.")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError(f"{path} is a device or a pipe, which cannot be replaced. Give the path of a file.")
    if path.is_dir() and not folder:
        raise UsageError(f"{path} is a folder, and a file is to be written. Give the path of a file.")
    if path.exists() and not force:
        raise UsageError(f"{path} exists already. Give another output with -o, or --force to replace it.")
    if not path.parent.is_dir():
        raise UsageError(f"There is no folder {path.parent}. Make it first, or give another output with -o.")
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # permissions alone do not tell
            pass
    except OSError as error:
        raise UsageError(
            f"The folder {path.parent} cannot be written: {error.strerror}. Give another output with -o."
        ) from error


def load(source: Any, *, outputs: Sequence[Any] = ()) -> Model:
    """The model at a path, or the model that is an object of TensorFlow.

    Args:
        source: The path of an ONNX file, a TensorFlow GraphDef, MetaGraphDef or SavedModel folder, a Keras file, or a
            TFLite file; or a tf.Graph, a session, a ConcreteFunction, a tf.function or a Keras model, which stays as it
            is: `to_tf` gives back one like it.
        outputs: What a tf.Graph or a session's graph is for, tensors or their names; by default all tensors that nobody
            reads. What leads to none of them, as initializers and optimizers do, is left as it is.

    Raises:
        MissingDependencyError: It is a Keras file, and tensorflow is not installed.
        ModelError: It cannot be read or is not supported.
        UsageError: It is no model.
    """
    if isinstance(source, str | Path):
        if outputs:
            raise UsageError(f"{source} is a file, and only a tf.Graph or a session is given outputs. Leave them out.")
        model = formats.format_module(formats.detect_format(Path(source))).load(Path(source))
    else:
        from graphquant.formats.tensorflow import from_tensorflow

        model = from_tensorflow(source, outputs)
    model.save_model = lambda edited, out, force: save(edited, out, force=force)
    _check_graphs(model, "load")
    return model


def save(model: Model, path: str | Path, *, force: bool = False) -> Path:
    """Writes `model` to `path`, whole or not at all; returns the path.

    Raises:
        UsageError: There is something at `path` and `force` is not given, it cannot be written, the suffix is another
            format's, or the model was made of an object in memory.
        ModelError: The model has no such form.
    """
    if model.live_object:
        raise UsageError(
            f"The model was made of {model.live_object}, in memory, and has no file's form. gq.to_tf(result) gives back one"
            " like it; write that as you would write your own."
        )
    destination = Path(path)
    check_model_output(destination, model.path, model.format, force=force)
    formats.format_module(model.format).save(model, destination)
    return destination


def as_model(model: Any) -> Model:
    """`model` itself, or the model at that path."""
    return model if isinstance(model, Model) else load(model)
