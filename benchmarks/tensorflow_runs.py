"""Run and train the models of `tensorflow_models.py` in TensorFlow, without graphquant's runner."""

from __future__ import annotations

import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.formats.tensorflow.runner import output_fetches
from graphquant.formats.tensorflow.session import import_tensorflow
from graphquant.formats.tensorflow.signatures import running_signatures, signature_inputs, signature_outputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    import graphquant as gq

tf = import_tensorflow()
v1 = tf.compat.v1
STEPS, RATE = 5, 1e-3

Arrays = dict[str, Any]


def signature_form(model: gq.Model) -> dict[Any, Any]:
    """Return the keys, types and shapes of all signatures, or the types and shapes of a graph's inputs by name."""
    source = model.source
    meta = source.meta_graph(source.message)
    if meta is None or not meta.signature_def:
        return {op.name: op.outputs for op in map(model.main.op, model.main.inputs)}
    return {
        (name, side, key): (info.dtype, str(info.tensor_shape), info.WhichOneof("encoding"))
        for name, signature in meta.signature_def.items()
        for side in ("inputs", "outputs")
        for key, info in getattr(signature, side).items()
    }


class LoadedModel:
    """A model of TensorFlow 2 as the object of `tf.saved_model.load`, or another one as a graph in a session."""

    def __init__(self, model: gq.Model, source: gq.Model, samples: list[Arrays]) -> None:
        """Load `model`, which was made from `source`. `samples` has the values of each input of `source`."""
        origin = model.source
        meta = origin.meta_graph(origin.message)
        names = [] if meta is None else running_signatures(source, meta)
        self.changed_variables = 0
        self._signatures = {name: meta.signature_def[name] for name in names}
        self._fetches = signature_outputs(source, meta) if names else output_fetches(model)
        # The samples by the op that each value is fed to.
        self._samples = samples
        if names:
            targets = {entry.spec.name: entry.targets for entry in signature_inputs(source, meta)}
            self._samples = [
                {
                    op: part
                    for name, value in sample.items()
                    for each in targets[name]
                    for op, part in each.encode(value).items()
                }
                for sample in samples
            ]
        infos = [info for signature in self._signatures.values() for info in signature.inputs.values()]
        # A signature of a sparse or ragged tensor takes objects of TensorFlow, which a session feeds in parts.
        has_objects = meta is not None and meta.object_graph_def.nodes and all(info.name for info in infos)
        self._loaded: Any = _load_objects(origin) if has_objects else None
        self.loader = "session" if self._loaded is None else "objects"
        if self._loaded is None:
            self._open_session(origin)

    def _open_session(self, source: Any) -> None:
        """Load the graph into a session and restore its variables."""
        self._session = v1.Session(graph=tf.Graph())
        with self._session.graph.as_default():
            if source.folder is not None:
                tags = source.message.meta_graphs[source.index].meta_info_def.tags
                v1.saved_model.load(self._session, list(tags), str(source.folder))
            elif source.message_type == "MetaGraphDef":
                v1.train.import_meta_graph(str(source.file)).restore(self._session, str(source.file.with_suffix("")))
            else:
                v1.import_graph_def(v1.GraphDef.FromString(source.message.SerializeToString()), name="")

    def structure(self) -> str:
        """Return the inputs and outputs of the loaded signatures, without the names of tensors."""
        functions = [] if self._loaded is None else [self._loaded.signatures[name] for name in self._signatures]
        forms = [(each.structured_input_signature, tf.nest.flatten(each.structured_outputs)) for each in functions]
        return re.sub(r"name='[^']*'|<tf.Tensor '[^']*'", "", str(forms))

    def run(self) -> list[Arrays]:
        """Return the outputs for each sample, in the order of graphquant."""
        if self._loaded is not None:
            return [{name: value.numpy() for name, value in self._outputs(sample).items()} for sample in self._samples]
        fetches = list(self._fetches.values())
        return [
            dict(zip(self._fetches, self._session.run(fetches, _feed(sample)), strict=True)) for sample in self._samples
        ]

    def _arguments(self, name: str, sample: Arrays) -> Arrays:
        """Return the values of a signature's inputs by key."""
        inputs = self._signatures[name].inputs
        return {key: tf.constant(sample[inputs[key].name.partition(":")[0]]) for key in sorted(inputs)}

    def _outputs(self, sample: Arrays) -> Arrays:
        results = {name: self._loaded.signatures[name](**self._arguments(name, sample)) for name in self._signatures}
        return {f"{name}/{key}": outputs[key] for name, outputs in results.items() for key in sorted(outputs)}

    def equal_functions(self) -> set[str]:
        """Return the traces of saved functions whose results equal those of a signature with the same input."""
        equal = set()
        for path, trace in self._traces():
            for name in self._signatures:
                with suppress(Exception):  # a function with other arguments
                    if all(self._gives_same(trace, name, sample) for sample in self._samples):
                        equal.add(f"{path} {trace.structured_input_signature} as {name}")
        return equal

    def _gives_same(self, trace: Any, name: str, sample: Arrays) -> bool:
        arguments = self._arguments(name, sample)
        inputs, results = _call(trace, [*arguments.values()])
        expected = self._loaded.signatures[name](**dict(zip(arguments, inputs, strict=True)))
        expected_values = [value.numpy().tobytes() for value in expected.values()]
        return bool(results) and all(value.numpy().tobytes() in expected_values for value in results)

    def _traces(self) -> Iterator[tuple[str, Any]]:
        """Yield the concrete functions of all objects with the path of their function."""
        pending: list[tuple[str, Any]] = [] if self._loaded is None else [("", self._loaded)]
        visited: set[int] = set()
        for path, item in pending:
            for trace in getattr(item, "concrete_functions", ()):
                yield path, trace
            for name, child in tf.train.TrackableView(item).children(item).items():
                if name != "signatures" and id(child) not in visited:
                    visited.add(id(child))
                    pending.append((f"{path}/{name}", child))

    def train(self) -> list[float]:
        """Return the losses of five steps of gradient descent on the outputs' square error; [] without variables."""
        results = self.run()
        names = [name for name, value in results[0].items() if is_float(value)] if results else []
        targets = [{name: 0.5 * result[name].astype(np.float32) for name in names} for result in results]
        if not names:
            return []
        return self._train_session(targets[0]) if self._loaded is None else self._train_objects(targets)

    def _train_objects(self, targets: list[Arrays]) -> list[float]:
        functions = [self._loaded.signatures[name] for name in self._signatures]
        captured = [variable for function in functions for variable in function.variables]
        variables = [each for each in {id(each): each for each in captured}.values() if each.dtype.is_floating]
        before, losses = [variable.numpy() for variable in variables], []
        for _ in range(STEPS if variables else 0):
            with tf.GradientTape() as tape:
                tape.watch(variables)
                pairs = zip([self._outputs(sample) for sample in self._samples], targets, strict=True)
                loss = _loss([(outputs[name], target[name]) for outputs, target in pairs for name in target])
            losses.append(float(loss))
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                if gradient is not None:
                    variable.assign_sub(RATE * tf.convert_to_tensor(gradient))
        pairs = zip(variables, before, strict=True)
        self.changed_variables = sum(bool((variable.numpy() != value).any()) for variable, value in pairs)
        return losses

    def _train_session(self, targets: Arrays) -> list[float]:
        graph, feed = self._session.graph, _feed(self._samples[0])
        with graph.as_default():
            variables = v1.trainable_variables()
            loss = _loss([(graph.get_tensor_by_name(self._fetches[name]), target) for name, target in targets.items()])
            gradients = tf.gradients(loss, variables) if variables else []
            trained = [pair for pair in zip(variables, gradients, strict=True) if pair[1] is not None]
            if not trained:
                return []
            steps = [v1.assign_sub(variable, RATE * tf.convert_to_tensor(gradient)) for variable, gradient in trained]
            values = [variable for variable, _ in trained]
            before = self._session.run(values)
            losses = [float(self._session.run([loss, steps], feed)[0]) for _ in range(STEPS)]
            after = self._session.run(values)
        self.changed_variables = sum(bool((old != new).any()) for old, new in zip(before, after, strict=True))
        return losses

    def save_trained(self, folder: Path) -> Path:
        """Save the trained model and return its path."""
        if self._loaded is not None:
            tf.saved_model.save(self._loaded, str(folder), signatures=self._loaded.signatures)
            return folder
        with self._session.graph.as_default():
            v1.train.Saver(v1.global_variables()).save(self._session, str(folder / "net"))
        return folder / "net.meta"


def is_float(value: Any) -> bool:
    """Return True for arrays of floating-point numbers, also of bfloat16."""
    return bool(tf.as_dtype(value.dtype).is_floating)


def _feed(sample: Arrays) -> Arrays:
    return {f"{op}:0": value for op, value in sample.items()}


def _load_objects(source: Any) -> Any:
    """Load a SavedModel as objects, without the slots of its optimizer, which TensorFlow cannot load from old files."""
    message = type(source.message).FromString(source.message.SerializeToString())
    meta = message.meta_graphs[source.index]
    for node in meta.object_graph_def.nodes:
        del node.slot_variables[:]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(source.folder, folder, dirs_exist_ok=True)
        Path(folder, "saved_model.pb").write_bytes(message.SerializeToString())
        return tf.saved_model.load(folder, list(meta.meta_info_def.tags))


def _loss(pairs: list[tuple[Any, Any]]) -> Any:
    """Return the sum of the mean square errors of outputs and their targets."""
    return tf.add_n([tf.reduce_mean(tf.square(tf.cast(output, tf.float32) - target)) for output, target in pairs])


def _call(trace: Any, arguments: list[Any]) -> tuple[list[Any], list[Any]]:
    """Call a concrete function with as many samples as it takes; return the arguments and the results."""
    used: list[Any] = []

    def argument(spec: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec):
            return spec
        value = arguments[len(used)][: spec.shape[0]]
        spec.shape.assert_is_compatible_with(value.shape)
        used.append(value)
        return value

    args, kwargs = tf.nest.map_structure(argument, trace.structured_input_signature)
    return used, tf.nest.flatten(trace(*args, **kwargs))
