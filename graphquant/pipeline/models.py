"""Models come in and go out: load and save."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant import formats
from graphquant.errors import UsageError
from graphquant.ir import Model
from graphquant.ir import check as _check_graphs
from graphquant.outputs import check_model_output

if TYPE_CHECKING:
    from collections.abc import Sequence


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
        model = formats.module(formats.format_of(Path(source))).load(Path(source))
    else:
        from graphquant.formats.tensorflow import load_live

        model = load_live(source, outputs)
    model.saver = lambda made, out, force: save(made, out, force=force)
    _check_graphs(model, "load")
    return model


def save(model: Model, path: str | Path, *, force: bool = False) -> Path:
    """Writes `model` to `path`, whole or not at all; returns the path.

    Raises:
        UsageError: There is something at `path` and `force` is not given, it cannot be written, the suffix is another
            format's, or the model was made of an object in memory.
        ModelError: The model has no such form.
    """
    if model.alive:
        raise UsageError(
            f"The model was made of {model.alive}, in memory, and has no file's form. gq.to_tf(result) gives back one"
            " like it; write that as you would write your own."
        )
    where = Path(path)
    check_model_output(where, model.path, model.format, force=force)
    formats.module(model.format).save(model, where)
    return where


def loaded(model: Any) -> Model:
    """`model` itself, or the model at that path."""
    return model if isinstance(model, Model) else load(model)


__all__ = ["load", "loaded", "save"]
