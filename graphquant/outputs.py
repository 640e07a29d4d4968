"""Where a result may be written: names by default, and what is refused before any work is done."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def default_output(path: Path) -> Path:
    """`model.onnx` to `model.quant.onnx`, the SavedModel `net/` to `net.quant/`, and `net.keras` to `net.quant/`."""
    if path.suffix in formats.KERAS:
        return path.with_suffix(".quant")
    if path.is_dir():
        named = path if path.name not in {"", ".."} else path.resolve()
        return named.parent / f"{named.name}.quant"
    return path.with_name(f"{path.stem}.quant{path.suffix}")


def check_model_output(path: Path, source: Path | None, form: str, *, force: bool = False) -> None:
    """Refuses an output that the model at `source`, of format `form`, cannot be written to, before any work is done.

    Raises:
        UsageError: The name is not one of that format's, or what `check_output` says.
    """
    keras = source is not None and source.suffix in formats.KERAS
    folder = keras or (source is not None and source.is_dir())
    check_output(path, source, force=force, folder=folder)
    suffixes = [suffix for suffix, name in formats.SUFFIXES.items() if name == form and suffix not in formats.KERAS]
    if keras and path.suffix in formats.KERAS:
        raise UsageError(
            f"{path} is named like a Keras file, which holds layers and no ops. The result is a SavedModel: give the"
            f" name of a folder, {path.with_suffix('')}; keras.layers.TFSMLayer puts it into a Keras model."
        )
    if folder:
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
        named = f"the suffix {path.suffix!r}" if path.suffix else "no suffix"
        raise UsageError(
            f"{path} has {named}, and the model is written in its own format. Give it one of {', '.join(suffixes)}."
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
