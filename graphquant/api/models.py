"""Loading and saving of models, the files of a model, and checks of output paths before any work is done."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant import formats
from graphquant.errors import GraphQuantError, ModelError, OutputExistsError, UsageError
from graphquant.formats.weights_files import may_have_external_data
from graphquant.ir import Model
from graphquant.ir import check_invariants as _check_graphs
from graphquant.ir.graph import check_tensor_sizes
from graphquant.utils.atomic_files import LFS_ADVICE, is_lfs_pointer, lock_output, remove_stale_files
from graphquant.utils.options import SignatureOptions, checks_types, resolve_options

if TYPE_CHECKING:
    from graphquant.calibration.data import MemoryData
    from graphquant.utils import Progress
    from graphquant.utils.options import CalibrateOptions, CompareOptions, InsertOptions

MAX_FILES = 100_000  # maximum number of files in the folder of a SavedModel

COMPILED_OPS = {
    "EPContext": "Quantize the model that was compiled.",
    "TRTEngineOp": "Quantize the model before its conversion to TensorRT.",
    "XlaCallModule": "Export the JAX model as ops, for example with jax2onnx.",
}
"""Advice for types of ops that hold a compiled program, whose ops no reader sees."""


def default_output(path: Path) -> Path:
    """Return the default output: `model.quant.onnx` for `model.onnx`, `net.quant/` for `net/` and `net.keras`."""
    if path.suffix in formats.KERAS_SUFFIXES:
        return path.with_suffix(".quant")
    if path.is_dir():
        resolved = path if path.name not in {"", ".."} else path.resolve()
        return resolved.parent / f"{resolved.name}.quant"
    return path.with_name(f"{path.stem}.quant{path.suffix}")


def check_model_output(
    path: Path, source: Path | None, model_format: str, *, force: bool = False, frozen: bool = False
) -> None:
    """Reject an output to which the model at `source`, of format `model_format`, cannot be written.

    A `frozen` model is one file, also if its source is a folder.

    Raises a UsageError if the suffix belongs to another format, or `check_output` rejects the path.
    """
    is_keras = not frozen and source is not None and source.suffix in formats.KERAS_SUFFIXES
    is_folder = is_keras or (not frozen and source is not None and source.is_dir())
    check_output(path, source, force=force, folder=is_folder)
    suffixes = [
        suffix
        for suffix, name in formats.SUFFIXES.items()
        if name == model_format and suffix not in formats.KERAS_SUFFIXES
    ]
    if is_keras and path.suffix in formats.KERAS_SUFFIXES:
        raise UsageError(
            f"{path} has the suffix of a Keras file, which stores layers instead of ops. The result is a SavedModel."
            f" Use the folder name {path.with_suffix('')}; keras.layers.TFSMLayer loads it into a Keras model."
        )
    if is_folder:
        if path.suffix in formats.SUFFIXES:
            raise UsageError(
                f"{path} has the suffix of a file, but a SavedModel is a folder. Remove {path.suffix!r} from the name."
            )
    elif path.suffix not in suffixes:
        if path.suffix == ".tflite" and not frozen:
            raise UsageError(
                f"{path} has the suffix of a TFLite file, but only TensorFlow models can be converted to TFLite, and"
                f" the model is {source or 'of another format'}. Use {path.with_suffix(suffixes[0])}, or quantize the"
                " TensorFlow model from which it was converted."
            )
        suffix_text = f"the suffix {path.suffix!r}" if path.suffix else "no suffix"
        form = "a frozen model is a TensorFlow graph" if frozen else "the model keeps its format"
        raise UsageError(f"{path} has {suffix_text}, but {form}. Use one of {', '.join(suffixes)}.")


def check_output(path: Path, source: Path | None = None, *, force: bool = False, folder: bool = False) -> None:
    """Reject an output that cannot or must not be written, and remove what killed processes left of it.

    Args:
        path: The output.
        source: The source model, which is never overwritten.
        force: If True, existing files may be replaced.
        folder: True if the output is a folder.

    Raises a UsageError if the folder cannot be created or is read-only, the output exists, or it is the source.
    """
    remove_stale_files([path])
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise UsageError(f"{path} is the source model, which is never overwritten. Use another output with -o.")
    if source is not None and source.is_dir() and source.resolve() in path.resolve().parents:
        raise UsageError(
            f"{path} is inside the folder of the source model, which is not changed. Use an output outside it."
        )
    if path.is_symlink():  # the link itself would be replaced, for example /dev/stdout
        raise UsageError(f"{path} is a symbolic link. Use the path that it points to, or another output.")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError(f"{path} is a device or a pipe, which cannot be replaced. Use the path of a file.")
    if path.is_dir() and not folder:
        raise UsageError(f"{path} is a folder, but the output is a file. Use the path of a file.")
    if path.exists() and not force:
        raise OutputExistsError(f"{path} exists already. Use another output with -o, or --force to replace it.")
    # Missing folders are created when the output is written.
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir():
        raise UsageError(f"{existing} is a file, so {path} cannot be written. Use another output with -o.")
    try:
        with tempfile.TemporaryFile(dir=existing):  # permission bits do not show read-only mounts
            pass
    except OSError as error:
        raise UsageError(
            f"The folder {existing} is not writable: {error.strerror}. Use another output with -o."
        ) from error


def load(
    source: Any,
    *,
    outputs: Sequence[Any] = (),
    allow_links: bool = False,
    signature: str | Sequence[str] = (),
    tags: str | Sequence[str] = (),
) -> Model:
    """Load a model from a path, or from an object of ONNX or TensorFlow.

    Args:
        source: Path of an ONNX file, a TensorFlow GraphDef, MetaGraphDef or SavedModel folder, a Keras file, or a
            TFLite file; or an onnx.ModelProto, a tf.Graph, a session, a ConcreteFunction, a tf.function or a Keras
            model. The object is not changed; `to_tf` returns a new TensorFlow object of the same kind.
        outputs: Output tensors of a tf.Graph or a session, or their names; by default all tensors without consumers.
            Ops that lead to no output, such as initializers and optimizers, are not quantized.
        allow_links: Follow links of the model's files out of its folder.
        signature: Signatures of a SavedModel to quantize and run; by default all are quantized, and those run that the
            data of the first one can feed.
        tags: Tags of the MetaGraph of a SavedModel; by default the one with `serve` and the fewest other tags.

    Raises:
        MissingDependencyError: The model is a Keras file, and tensorflow is not installed.
        ModelError: The model cannot be read, or is not supported.
        UsageError: The source is not a model, or has no such signature or tags.
    """
    values = {"allow_links": allow_links, "signature": signature, "tags": tags}
    return _load(source, outputs, resolve_options(SignatureOptions, None, values))


def _load(source: Any, outputs: Sequence[Any], chosen: SignatureOptions, *, defers: bool = False) -> Model:
    """Load a model; if `defers`, functions that nothing calls are read and checked when they are needed."""
    if isinstance(source, str | Path):
        if outputs:
            raise UsageError(
                f"{source} is a file, but outputs can be chosen only for a tf.Graph or a session. Remove outputs."
            )
        model = _load_file(Path(source), allow_links=chosen.allow_links, tags=chosen.tags)
    elif chosen.tags:
        raise UsageError(f"tags choose a MetaGraph of a SavedModel, but the model is a {type(source).__name__}.")
    elif type(source).__name__ == "ModelProto":  # onnx need not be imported for this check
        from graphquant.formats.onnx import from_onnx

        if outputs:
            raise UsageError("A ModelProto defines its outputs. Remove outputs, which are for a tf.Graph or a session.")
        model = from_onnx(source)
    else:
        from graphquant.formats.tensorflow import from_tensorflow

        model = from_tensorflow(source, outputs)
    if not defers:
        model.build_graphs()
    _check_graphs(model, "load")
    return select_signatures(model, chosen.signature)


def select_signatures(model: Model, names: Sequence[str], *, separate_inputs: bool = False) -> Model:
    """Return the model with only these signatures, or as it is without names.

    With `separate_inputs`, each has its own data, also where they take inputs of the same key.

    Raises a UsageError if the model has no such signature.
    """
    if not names or model.source is None:
        return model
    if model.format != "tensorflow":
        raise UsageError(
            f"{model.path or 'The model'} has no signatures, because it is not a SavedModel. Remove --signature, and"
            " name no signature in the data."
        )
    from graphquant.formats.tensorflow import select_signatures as select

    return select(model, names, separate_inputs=separate_inputs)


def _load_file(path: Path, *, allow_links: bool, tags: Sequence[str]) -> Model:
    """Load a model file; if that fails, find out whether it is a pointer or has the suffix of another format."""
    model_format = formats.detect_format(path)
    if tags and not (model_format == "tensorflow" and path.is_dir()):
        raise UsageError(f"{path} has no MetaGraphs to choose by tags, because it is not a SavedModel. Remove --tags.")
    try:
        if tags:
            from graphquant.formats.tensorflow import load as load_meta_graph

            return load_meta_graph(path, allow_links=allow_links, tags=tags)
        return formats.format_module(model_format).load(path, allow_links=allow_links)
    except ModelError as error:
        if not path.is_file() or path.stat().st_size >> 31:  # no format has larger files, which would be read
            raise
        with suppress(OSError):
            if is_lfs_pointer(path):
                raise ModelError(f"{path} {LFS_ADVICE}") from error
        suffixes = {"onnx": ".onnx", "tensorflow": ".pb", "tflite": ".tflite"}
        for other, suffix in suffixes.items():
            if other != model_format and _is_model_of(other, path):
                raise ModelError(
                    f"{path} contains a model of the format {other}, but has the suffix {path.suffix!r}. Rename it to"
                    f" {path.with_suffix(suffix).name}."
                ) from error
        raise


def _is_model_of(model_format: str, path: Path) -> bool:
    try:
        return any(True for _ in formats.format_module(model_format).load(path).reachable_ops())
    except GraphQuantError:
        return False


@checks_types
def save(model: Model, path: str | Path, *, force: bool = False, progress: Progress | None = None) -> Path:
    """Write `model` to `path` atomically and return the path. `progress` receives the megabytes of a weights file.

    Raises:
        UsageError: The path exists and `force` is False, it is not writable, another process is writing it, its suffix
            belongs to another format, or the model was loaded from an object in memory.
        ModelError: The model cannot be stored in this form.
    """
    return write_model(model, Path(path), force=force, progress=progress)


def write_model(
    model: Model, destination: Path, *, force: bool, progress: Progress | None, emission: Any = None
) -> Path:
    """Write `model` like `save`; the `serialized_emission` of a `Result` saves the time to emit its model again."""
    if object_name := formats.memory_object_name(model):
        raise UsageError(
            f"The model was loaded from {object_name} in memory and has no file format. gq.to_tf(result) returns"
            " such an object, which you can save like your own."
        )
    frozen = formats.is_graph_file(model)
    check_model_output(destination, model.path, model.format, force=force, frozen=frozen)
    with lock_output(destination):
        # Again, because another process may have written it since.
        check_model_output(destination, model.path, model.format, force=force, frozen=frozen)
        known = {} if emission is None else {"emission": emission}
        formats.format_module(model.format).save(model, destination, progress, **known)
    return destination


def omission_notes(model: Model) -> list[str]:
    """Return notes on the parts of a model that are not quantized, or that no data reaches."""
    types = sorted({op.type for _, op in model.reachable_ops()} & COMPILED_OPS.keys())
    notes = [f"{name} holds a compiled program, and nothing in it is quantized. {COMPILED_OPS[name]}" for name in types]
    if model.format != "tensorflow":
        return notes
    from graphquant.formats import tensorflow

    return [*notes, *filter(None, [tensorflow.describe_unfrozen_variables(model)]), *tensorflow.omission_notes(model)]


def load_source(
    model: Any, options: InsertOptions | CalibrateOptions | CompareOptions, data: str | MemoryData | None
) -> Model:
    """Return the model to run on `data`, loaded if it is none yet, with the signatures of the options or the data.

    Raises a ModelError if the model cannot be read, or a tensor would fill memory, and a UsageError if the data is for
    other signatures than those of the options, or the model has no such signature.
    """
    data_names: tuple[str, ...] = ()
    if data is not None:
        from graphquant.calibration.data import split_by_signature

        data_names = tuple(split_by_signature(data))
    if data_names and options.signature and set(options.signature) != set(data_names):
        raise UsageError(
            f"The data is for the signatures {', '.join(data_names)}, but {', '.join(options.signature)} were selected."
            " Give data for each of them."
        )
    source = select_signatures(as_model(model, options), data_names, separate_inputs=True)
    if data is not None and source.format == "tensorflow":
        from graphquant.formats.tensorflow import describe_unfrozen_variables

        # The data is compared with the inputs later, and some of them may not matter, such as labels.
        if problem := describe_unfrozen_variables(source):
            raise ModelError(problem)
    check_tensor_sizes(source, options.max_memory)
    return source


def as_model(model: Any, options: SignatureOptions | None = None, *, defers: bool = False) -> Model:
    """Return `model`, loaded if it is a path or an object of a framework, with the signatures of the options.

    Raises a ModelError if the model cannot be read, and a UsageError if the model has no such signature or tags.
    """
    settings = options or SignatureOptions()
    if not isinstance(model, Model):
        return _load(model, (), settings, defers=defers)
    if settings.tags and formats.meta_graph_tags(model) != set(filter(None, settings.tags)):
        raise UsageError("The model is loaded, so its MetaGraph can no longer be chosen by tags. Pass tags to gq.load.")
    return select_signatures(model, settings.signature)


def model_files(path: Path, *, allow_links: bool = False) -> tuple[Path, ...]:
    """Return the files of the model at `path`, starting with the file that refers to the others.

    With `allow_links`, its files may be links out of its folder. Raises a ModelError if there is no model, or one of
    its files is missing or outside its folder, and an OSError if a file cannot be read.
    """
    format_name = formats.detect_format(path)
    if path.is_dir():
        return _saved_model_files(path, allow_links=allow_links)
    if format_name == "onnx" and may_have_external_data(path):
        from graphquant.formats.onnx.file_writer import external_data_files

        return (path, *external_data_files(path, allow_links=allow_links))
    if path.suffix == ".meta":
        names = _checkpoint_file_names(path, [file.name for file in path.parent.iterdir()])
        files = (path, *map(path.with_name, names))
        formats.refuse_outside_links(path.parent, () if allow_links else files[1:])
        return files
    return (path,)


def companion_file_names(path: Path, folder_names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the other files of a model, relative to its folder, even if they do not exist.

    `folder_names` are the files in the folder from which the model comes; only `path` itself must exist. Raises a
    ModelError if the file is not a model, and an OSError if it cannot be read.
    """
    if path.suffix == ".meta":
        return tuple(_checkpoint_file_names(path, folder_names))
    if formats.detect_format(path) != "onnx" or not may_have_external_data(path):
        return ()
    from graphquant.formats.onnx.file_writer import external_data_names

    return external_data_names(path)


def _checkpoint_file_names(path: Path, folder_names: Iterable[str]) -> list[str]:
    """Return the names of the checkpoint files of a MetaGraph."""
    suffixes = {name: name.removeprefix(path.stem) for name in sorted(folder_names) if name.startswith(f"{path.stem}.")}
    return [name for name, suffix in suffixes.items() if suffix == ".index" or suffix.startswith(".data-")]


def _saved_model_files(path: Path, *, allow_links: bool) -> tuple[Path, ...]:
    """Return the files of a SavedModel, sorted, with `saved_model.pb` first."""
    paths = list(itertools.islice(formats.walk_saved_model(path, follow_links=allow_links), MAX_FILES + 1))
    if len(paths) > MAX_FILES:
        raise ModelError(f"{path} has more than {MAX_FILES} files. Give the folder of one SavedModel.")
    formats.refuse_outside_links(path, () if allow_links else paths)
    files = [file for file in paths if not file.is_dir()]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is not a regular file. Remove it from the model's folder.")
    return tuple(sorted(files, key=lambda file: (file.parent != path or file.stem != "saved_model", file)))
