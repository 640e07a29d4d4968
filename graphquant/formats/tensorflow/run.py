"""Runs a model in TensorFlow, and shows its tensors."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from graphquant.errors import DataError, ModelError, did_you_mean
from graphquant.formats import Feeds, InputSpec
from graphquant.formats.ahead import ahead
from graphquant.formats.tensorflow.batching import batchable
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.observe import instrument, unfetchable
from graphquant.formats.tensorflow.session import INIT_SIGNATURE, Session, Watch, tensorflow
from graphquant.ir import Model, TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    import numpy.typing as npt

__all__ = ["TensorFlowRunner", "inputs", "runner"]

SERVING: Final = "serving_default"


def runner(model: Model) -> TensorFlowRunner:
    """A runner for `model` as it stands, edits included.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: TensorFlow refuses the model.
    """
    return TensorFlowRunner(model, tensorflow())


def inputs(model: Model) -> Sequence[InputSpec]:
    """What a run of `model` must be fed: its signature's inputs or, without one, its placeholders."""
    return _inputs(model, emit(model))


def _inputs(model: Model, message: Any) -> Sequence[InputSpec]:
    meta = model.source.meta_graph(message)
    signature = _signature(meta) if meta is not None else None
    return _placeholders(model) if signature is None else _signature_inputs(model, signature)


class TensorFlowRunner:
    """Runs one signature of a model, or what leads to all tensors that nobody reads.

    Attributes:
        inputs: What must be fed, by the placeholder's name.
        outputs: The signature's keys, or the names of the tensors.
    """

    def __init__(self, model: Model, module: Any) -> None:
        self._tf = module
        self._model = model
        message = emit(model)
        self.inputs = _inputs(model, message)
        self._fetches = _fetches(model, message)
        self.outputs: Sequence[str] = tuple(self._fetches)
        known = {spec.name for spec in self.inputs}
        optional = [_spec(model, name) for name in model.main.inputs if name not in known and model.main.slots(name)]
        self._keys = {key: spec for spec in (*optional, *self.inputs) for key in (*spec.aliases, spec.name)}
        self._hidden = unfetchable(model.main)
        self._reached: Watch | None = None

    @cached_property
    def _session(self) -> Session:
        return Session.start(self._tf, self._model)

    def run(self, feeds: Feeds) -> dict[str, npt.NDArray[Any]]:
        """The model's outputs by name, for one feed; inputs may go by name or alias.

        An output on a branch that is not taken is left out; one inside a loop is that of the last round.

        Raises:
            DataError: An input is missing, unknown, or of another shape than the model wants.
            ModelError: TensorFlow cannot run the model.
        """
        fed = self._feed(feeds)
        tensors = self.ends
        if self._reached is None:
            try:
                return dict(zip(tensors, self._session.run(list(self._fetches.values()), fed), strict=True))
            except ModelError:
                if not any(tensor.op in self._hidden for tensor in tensors.values()):
                    raise
            # Perhaps an output was not reached, which TensorFlow takes for an error; any other one comes up again.
            self._reached = self._watch(list(tensors.values()))
        seen = self._reached.values(fed)
        return {key: seen[tensor][-1] for key, tensor in tensors.items() if seen[tensor]}

    def timed(self, feeds: Sequence[Feeds]) -> Callable[[], object]:
        """What runs the model once on each of `feeds`, on one thread, as fast as TensorFlow can make it.

        Raises:
            DataError: An input is missing, unknown, or of another shape than the model wants.
            ModelError: TensorFlow cannot run the model.
        """
        started, fed = Session.start(self._tf, self._model, timed=True), [self._feed(feed) for feed in feeds]
        ends = [started.operation(name) for name in self._fetches.values()]
        for one in fed:
            started.run(ends, one)
        return lambda: [started.session.run(ends, one) for one in fed]

    @property
    def ends(self) -> Mapping[str, TensorRef]:
        """The tensors that `outputs` are."""
        return {key: _tensor(name) for key, name in self._fetches.items()}

    @staticmethod
    def unwatchable(_tensors: Sequence[TensorRef]) -> dict[TensorRef, str]:
        """None: queues carry values out of every function and frame."""
        return {}

    @cached_property
    def batchable(self) -> bool:
        """Whether samples may be joined along axis 0 of every input and each result is still that of its sample."""
        return batchable(self._tf, self._model, self.inputs, list(self.ends.values()))

    def sizes(self, tensors: Sequence[TensorRef], feed: Feeds) -> dict[TensorRef, int]:
        """How many elements each tensor has in one run of `feed`, over all iterations; 0 if it is not reached.

        Raises:
            DataError: An input is missing, unknown, or of another shape than the model wants.
            ModelError: TensorFlow cannot run the model.
        """
        watch = self._watch(tensors, sizes=True)
        try:
            return {tensor: sum(map(int, values)) for tensor, values in watch.values(self._feed(feed)).items()}
        finally:
            watch.close()

    def observe(
        self,
        tensors: Sequence[TensorRef],
        feeds: Iterable[Feeds],
        *,
        beside: Sequence[TensorRef] = (),
        at_once: int = 1,
        look: Callable[[dict[TensorRef, list[npt.NDArray[Any]]]], object] | None = None,
    ) -> Generator[dict[TensorRef, list[npt.NDArray[Any]]], None, None]:
        """For each feed the values that each tensor took: none if it was not reached, several inside loops.

        Args:
            tensors: What to observe.
            feeds: What to run.
            beside: What other calls observe on the same feeds, for want of memory. TensorFlow fuses ops between which
                nothing is watched, so sizes are taken of these.
            at_once: How many feeds' values there may be at once: while those of one are looked at, another is run, on
                all threads and one after the other, for a model may have a state.
            look: Is shown what each feed gave; what it takes out is not given.

        Raises:
            DataError: An input is missing, unknown, or of another shape than the model wants.
            ModelError: TensorFlow cannot run the model.
        """
        watch = self._watch(tensors, beside)
        try:
            yield from ahead(lambda feed: watch.values(self._feed(feed)), feeds, at_once, look, threads=1)
        finally:
            watch.close()

    def _watch(self, tensors: Sequence[TensorRef], beside: Sequence[TensorRef] = (), *, sizes: bool = False) -> Watch:
        """A session that shows `tensors`, or with `sizes` how many elements each value has; sizes of those `beside`."""
        known = dict.fromkeys([*tensors, *beside])
        counted, live = frozenset(known if sizes else beside), set(self._model.live())
        queued = [tensor for tensor in known if tensor.graph in live and (tensor.graph or tensor.op in self._hidden)]
        direct = [tensor for tensor in known if not tensor.graph and tensor.op not in self._hidden]
        watched = instrument(self._model, queued, counted) if queued else self._model
        session = Session.start(self._tf, watched) if queued else self._session
        dtypes = ["int64" if tensor in counted else self._model.output(tensor).dtype or "float32" for tensor in queued]
        names = {tensor: f"{tensor.op}:{tensor.port}" for tensor in direct}
        return Watch(
            session=session,
            own=bool(queued),
            tensors=list(dict.fromkeys(tensors)),
            direct=names | session.sizes({tensor: names[tensor] for tensor in direct if tensor in counted}),
            queued=dict(zip(queued, session.queues(dtypes), strict=True)),
            # The outputs only have to run: one on the branch of a TF1 cond that is not taken has no value to fetch.
            ends=[session.operation(name) for name in _fetches(watched, session.message).values()],
        )

    def _feed(self, feeds: Feeds) -> dict[str, Any]:
        fed: dict[str, Any] = {}
        for key, value in feeds.items():
            spec = self._keys.get(key)
            if spec is None:
                raise DataError(
                    f"The data has {key!r}, which is no input of the model. Its inputs are "
                    f"{', '.join(spec.name for spec in self.inputs)}.{did_you_mean(key, self._keys)}"
                )
            if not _fits(spec, value.shape):
                raise DataError(
                    f"The data for {spec.name!r} has shape {value.shape}, and the model wants {_written(spec)}."
                    " Reshape the data."
                )
            fed[f"{spec.name}:0"] = value
        missing = [spec.name for spec in self.inputs if f"{spec.name}:0" not in fed]
        if missing:
            raise DataError(f"The data lacks the model's input {missing[0]!r}. It has {', '.join(feeds) or 'nothing'}.")
        return fed


def _signature(meta: Any) -> Any:
    """The signature that serves: `serving_default`, else the first with outputs; None if there is none."""
    names = [SERVING, *sorted(meta.signature_def)]
    found = (meta.signature_def[name] for name in names if name in meta.signature_def and name != INIT_SIGNATURE)
    return next((signature for signature in found if any(info.name for info in signature.outputs.values())), None)


def _signature_inputs(model: Model, signature: Any) -> tuple[InputSpec, ...]:
    specs = []
    for key in sorted(signature.inputs):
        name = signature.inputs[key].name.partition(":")[0]
        if name not in model.main or not model.main.op(name).outputs:
            raise ModelError(f"The signature's input {key!r} is {name!r}, which does not exist. The model is damaged.")
        specs.append(_spec(model, name, key))
    return tuple(specs)


def _spec(model: Model, name: str, *keys: str) -> InputSpec:
    known = model.main.op(name).outputs[0]
    aliases = tuple(dict.fromkeys(key for key in (f"{name}:0", *keys) if key != name))
    return InputSpec(name=name, dtype=known.dtype or "float32", shape=known.shape, aliases=aliases)


def _placeholders(model: Model) -> tuple[InputSpec, ...]:
    """The placeholders that the outputs depend on."""
    needed, todo = set(model.main.outputs), list(model.main.outputs)
    while todo:
        for source in model.main.nx.pred[todo.pop()]:
            if source not in needed:
                needed.add(source)
                todo.append(source)
    names = [name for name in model.main.inputs if name in needed and not model.main.slots(name)]
    return tuple(_spec(model, name) for name in names)


def _fetches(model: Model, message: Any = None) -> dict[str, str]:
    """The outputs of a run and the tensors that they are; `message` is what `model` was emitted as."""
    meta = model.source.meta_graph(emit(model) if message is None else message)
    signature = _signature(meta) if meta is not None else None
    return _sinks(model) if signature is None else _signature_outputs(signature)


def _signature_outputs(signature: Any) -> dict[str, str]:
    names = {key: signature.outputs[key].name for key in sorted(signature.outputs)}
    return {key: name if ":" in name else f"{name}:0" for key, name in names.items() if name}


def _tensor(name: str) -> TensorRef:
    """The tensor of the main graph called "op:port"."""
    op, _, port = name.partition(":")
    return TensorRef("", op, int(port or 0))


def _sinks(model: Model) -> dict[str, str]:
    found = {}
    for label in model.main.outputs:
        tensor = model.main.producer(Use("", label, 0))
        if tensor is not None:
            found[label.removeprefix("@")] = f"{tensor.op}:{tensor.port}"
    return found


def _fits(spec: InputSpec, shape: tuple[int, ...]) -> bool:
    if spec.shape is None:
        return True
    return len(shape) == len(spec.shape) and all(
        wanted is None or wanted == given for wanted, given in zip(spec.shape, shape, strict=True)
    )


def _written(spec: InputSpec) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in spec.shape or ()) + "]"
