"""Load Keras models: models in memory by tracing, `.keras` and `.h5` files by Keras' export to a SavedModel.

Files of Keras 2 are read by the package tf_keras, its continuation, if it is installed. Keras 3 reads a part of them.

A Keras file may contain Python code (Lambda layers), names of arbitrary classes and links to other files. None of these
are followed: the file's configuration is checked before Keras reads it, and Keras loads it in safe mode.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import random
import shutil
import tempfile
import weakref
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Final

from graphquant.errors import MissingDependencyError, ModelError, UsageError
from graphquant.formats.tensorflow.function_names import normalize_function_names
from graphquant.formats.tensorflow.load import build_model
from graphquant.formats.tensorflow.session import first_error_line, import_tensorflow, silence_stderr
from graphquant.formats.tensorflow.source import read_source

if TYPE_CHECKING:
    from graphquant.ir import Model

MAX_CONFIG_BYTES: Final = 1 << 26
MAX_EXPANSION: Final = 100  # Keras stores zip members uncompressed. A larger expansion indicates an attack on memory.
_CONFIG_FILE: Final = "config.json"
_METADATA_FILE: Final = "metadata.json"
_WEIGHTS_FILE: Final = "model.weights.h5"
_TF_KERAS: Final = "tf_keras"
_EXPORT_LOCK: Final = RLock()  # an export replaces state of the process, and a class of the caller may load a file
_NAME_COUNTERS: Final = "object_name_uids"  # where Keras 3 counts the names of layers
_CODE_CLASSES: Final = frozenset({"Lambda", "__lambda__", "TFSMLayer", "TorchModuleWrapper", "JaxLayer", "FlaxLayer"})
"""Classes whose configuration is code, or refers to files with code."""

_TRUSTED_PACKAGES: Final = frozenset({"keras", "tf_keras", "builtins"})
"""Trusted origins of classes. Keras writes "builtins" for its own functions."""

_KERAS_ERRORS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
)
"""The exceptions that Keras raises for damaged or foreign files."""


def trace_keras_model(tensorflow: Any, keras: Any, model: Any) -> Any:
    """Return the ConcreteFunction of a Keras model in memory, traced as Keras exports it: inference, any batch size."""
    _require_tensorflow_backend(keras)
    from keras.src.export.export_utils import get_input_signature

    def call_model(*inputs: Any) -> Any:
        return model(*inputs)

    # A tensor's name contains a counter of the process; its layer has the name that the model's author chose.
    layers = iter([tensor._keras_history.operation.name for tensor in getattr(model, "inputs", None) or ()])  # noqa: SLF001

    def named_spec(tensor: Any) -> Any:
        return tensorflow.TensorSpec(tensor.shape, tensor.dtype, name=next(layers, tensor.name))

    try:
        signature = keras.tree.map_structure(named_spec, get_input_signature(model))
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"The Keras model {model.name!r} does not declare its inputs. Call it once on a batch first."
        ) from error
    try:
        return tensorflow.function(call_model, input_signature=signature, autograph=False).get_concrete_function()
    except (*_KERAS_ERRORS, tensorflow.errors.OpError) as error:
        raise ModelError(f"Keras cannot trace the model {model.name!r}: {first_error_line(str(error))}.") from error


def load_keras(path: Path) -> Model:
    """Load a `.keras` or `.h5` file as the SavedModel that Keras exports. The result is saved as a SavedModel.

    Raises a MissingDependencyError if tensorflow is not installed, a ModelError if the file is damaged, or contains
    code, and a UsageError if Keras does not run on TensorFlow.
    """
    try:
        tensorflow = import_tensorflow()
    except MissingDependencyError as error:
        raise MissingDependencyError(
            f"{path} is a Keras file, which Keras reads with TensorFlow, and tensorflow is not installed."
            " Install it with: pip install 'graphquant[tensorflow]'"
        ) from error
    config, version = _read_safe_config(path)
    temp_folder = _TempFolder(tempfile.mkdtemp(prefix="graphquant-keras-"))
    folder = Path(temp_folder.name) / "model"
    # tf_keras prints the signatures of each export. The standard output is for the results of a command.
    with _EXPORT_LOCK, silence_stderr(), contextlib.redirect_stdout(io.StringIO()):
        keras = _import_keras(version)
        is_tf_keras = keras.__name__ == _TF_KERAS
        _require_known_classes(keras, path, config)
        try:
            with _fixed_order(is_tf_keras):
                model = keras.saving.load_model(path, compile=False, safe_mode=True)
                model.export(folder, **({} if is_tf_keras else {"format": "tf_saved_model", "verbose": False}))
        except (*_KERAS_ERRORS, tensorflow.errors.OpError) as error:
            if _is_keras_2(version) and not is_tf_keras:
                raise MissingDependencyError(
                    f"{path} was written by Keras {version}, and Keras {keras.__version__} cannot read it. Install the"
                    " package that reads such files with: pip install tf-keras"
                ) from error
            raise ModelError(
                f"Keras {keras.__version__} cannot read {path}: {first_error_line(str(error))}. Export it to a"
                " SavedModel with model.export(folder) in its own environment, and pass that folder."
            ) from error
    source = read_source(folder)
    _normalize_saved_functions(source.meta_graph(source.message))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return build_model(replace(source, digest=digest, temp_folder=temp_folder), path)


@contextlib.contextmanager
def _fixed_order(is_tf_keras: bool) -> Iterator[None]:
    """Make exports equal: TensorFlow orders variables by addresses, and Keras draws seeds and counts their names."""
    # tf_keras still names each LSTM and GRU at random, and counts the names of layers that other layers create.
    from tensorflow.python.framework.func_graph import FuncGraph

    variables = FuncGraph.variables

    def creation(variable: Any) -> str:  # the number at the end of its ID; some have none, so it is text of one width
        return str(variable._unique_id).rpartition("_")[2].rjust(20)  # noqa: SLF001  # names are not unique

    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        random.seed(0)
        if not is_tf_keras:
            from keras.src.backend.common import global_state

            counters = global_state.get_global_attribute(_NAME_COUNTERS)
            stack.callback(global_state.set_global_attribute, _NAME_COUNTERS, counters)
            global_state.set_global_attribute(_NAME_COUNTERS, None)
        FuncGraph.variables = property(lambda graph: tuple(sorted(variables.fget(graph), key=creation)), variables.fset)
        stack.callback(setattr, FuncGraph, "variables", variables)
        yield


def trace_tf_keras_model(tensorflow: Any, model: Any) -> Any:
    """Return the ConcreteFunction of a tf_keras model in memory: inference, any batch size."""
    if (signature := model.save_spec()) is None:
        raise UsageError(f"The Keras model {model.name!r} does not declare its inputs. Call it once on a batch first.")
    arguments, keywords = signature

    def call_model(*inputs: Any) -> Any:
        return model(*inputs, **keywords, training=False)

    try:
        return tensorflow.function(call_model, input_signature=arguments, autograph=False).get_concrete_function()
    except (*_KERAS_ERRORS, tensorflow.errors.OpError) as error:
        raise ModelError(f"tf_keras cannot trace the model {model.name!r}: {first_error_line(str(error))}.") from error


class _TempFolder:
    """A temporary folder that is deleted with the last reference to this object."""

    def __init__(self, name: str) -> None:
        self.name = name
        weakref.finalize(self, shutil.rmtree, name, ignore_errors=True)


def _normalize_saved_functions(meta: Any) -> None:
    """Give functions the same names each time the file is read."""
    names, objects = normalize_function_names(meta.graph_def), meta.object_graph_def
    for old, new in names.items():
        if old != new and old in objects.concrete_functions:
            objects.concrete_functions[new].CopyFrom(objects.concrete_functions[old])
            del objects.concrete_functions[old]
    for node in objects.nodes:
        if node.WhichOneof("kind") == "function":
            node.function.concrete_functions[:] = [names.get(name, name) for name in node.function.concrete_functions]
        elif node.WhichOneof("kind") == "bare_concrete_function":
            bare = node.bare_concrete_function
            bare.concrete_function_name = names.get(bare.concrete_function_name, bare.concrete_function_name)


def _is_keras_2(version: str) -> bool:
    return version.startswith(("1.", "2."))


def _import_keras(version: str) -> Any:
    """Return the Keras that reads files of a version: tf_keras for Keras 2 if it is installed, else Keras 3."""
    if _is_keras_2(version) and importlib.util.find_spec(_TF_KERAS) is not None:
        return importlib.import_module(_TF_KERAS)
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras

    _require_tensorflow_backend(keras)
    return keras


def _require_tensorflow_backend(keras: Any) -> None:
    backend = keras.config.backend()
    if backend != "tensorflow":
        raise UsageError(f"Keras runs on {backend} in this process. Set KERAS_BACKEND=tensorflow before importing it.")


def _read_safe_config(path: Path) -> tuple[Any, str]:
    """Read a file's configuration, and the version of the Keras that wrote it, "" if the file has none.

    Files with code, links to other files, and files not from Keras are refused.
    """
    try:
        text, version = _read_zip_config(path) if path.suffix == ".keras" else _read_h5_config(path)
        config = json.loads(text)
    except (OSError, ValueError, LookupError, RuntimeError, zipfile.BadZipFile) as error:
        raise ModelError(f"{path} is not a Keras model: {first_error_line(str(error))}. It may be damaged.") from error
    for entry in _json_objects(config):
        name, layer_config = entry.get("class_name"), entry.get("config")
        if isinstance(name, str) and name in _CODE_CLASSES:
            layer_name = layer_config.get("name") if isinstance(layer_config, dict) else None
            quoted_name = f" {layer_name!r}" if isinstance(layer_name, str) else ""
            raise ModelError(
                f"{path} has the {str(name).strip('_')} layer{quoted_name}, which contains or refers to"
                " code. Code in model files is never run. If you trust it, export the model with"
                " model.export(folder) and pass that folder."
            )
    return config, version


def _require_known_classes(keras: Any, path: Path, config: Any) -> None:
    """Refuse classes that are neither part of Keras nor registered by the caller. Nothing is imported for a file."""
    for entry in _json_objects(config):
        name, module, registered_name = (entry.get(key) for key in ("class_name", "module", "registered_name"))
        is_trusted = isinstance(module, str) and module.partition(".")[0] in _TRUSTED_PACKAGES
        if not isinstance(name, str) or is_trusted or (module is None and registered_name is None):
            continue
        if keras.saving.get_registered_object(str(registered_name)) is None:
            raise ModelError(
                f"{path} needs the class {name!r}, which is not part of Keras and is never imported. Export the"
                " model to a SavedModel with model.export(folder) in its own environment, and pass that folder."
            )


def _json_objects(config: Any) -> Iterator[dict[str, Any]]:
    pending = [config]
    while pending:
        current = pending.pop()
        if isinstance(current, dict):
            yield current
            pending.extend(current.values())
        elif isinstance(current, list):
            pending.extend(current)


def _read_zip_config(path: Path) -> tuple[bytes, str]:
    """Read the configuration and the version of a `.keras` file after its members were checked."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.file_size > MAX_CONFIG_BYTES and member.file_size > MAX_EXPANSION * member.compress_size:
                raise ValueError(f"{member.filename[:60]!r} would unpack to {member.file_size} bytes.")
        members = [name for name in (_CONFIG_FILE, _METADATA_FILE) if name in archive.namelist()]
        if any(archive.getinfo(name).file_size > MAX_CONFIG_BYTES for name in members):
            raise ValueError("its configuration is too large.")
        if _WEIGHTS_FILE in archive.namelist():
            with archive.open(_WEIGHTS_FILE) as weights:
                _require_self_contained_h5(weights)
        metadata = json.loads(archive.read(_METADATA_FILE)) if _METADATA_FILE in members else {}
        version = metadata.get("keras_version") if isinstance(metadata, dict) else None
        return archive.read(_CONFIG_FILE), str(version or "")


def _read_h5_config(path: Path) -> tuple[bytes, str]:
    """Read the configuration and the version of an `.h5` file that contains its weights."""
    import h5py

    _require_self_contained_h5(path)
    with h5py.File(path, "r") as file:
        config, version = file.attrs.get("model_config"), file.attrs.get("keras_version", "")
    if config is None:
        raise ModelError(f"{path} contains weights without the layers. Save the whole model.")
    config_bytes = config.encode() if isinstance(config, str) else bytes(config)
    return config_bytes, version.decode(errors="replace") if isinstance(version, bytes) else str(version)


def _require_self_contained_h5(file: Any) -> None:
    """Refuse links to other files."""
    import h5py

    with h5py.File(file, "r") as opened:
        pending: list[Any] = [opened]
        visited = set()
        while pending:
            group = pending.pop()
            if group.id in visited:
                continue
            visited.add(group.id)
            for key in group:
                is_external = isinstance(group.get(key, getlink=True), h5py.ExternalLink)
                member = None if is_external else group.get(key)
                if is_external or (isinstance(member, h5py.Dataset) and (member.external or member.is_virtual)):
                    raise ValueError(f"{key[:60]!r} is stored in another file.")
                if isinstance(member, h5py.Group):
                    pending.append(member)
