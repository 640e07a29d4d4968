"""Run a model in TensorFlow and observe its tensors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from graphquant.errors import DataError, ModelError, did_you_mean
from graphquant.formats import Feeds, InputSpec, prefetch
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.session import (
    RunSequence,
    TensorFlowSession,
    TensorWatch,
    import_tensorflow,
    instrument_with_queues,
    unfetchable_ops,
)
from graphquant.formats.tensorflow.signatures import (
    FedTensors,
    SignatureInput,
    output_tensors,
    running_signatures,
    signature_inputs,
    signature_outputs,
    signature_placeholders,
    signatures_with_outputs,
)
from graphquant.formats.tensorflow.source import FrozenSignature
from graphquant.ir import Model, TensorRef, Use, reachable

if TYPE_CHECKING:
    import numpy.typing as npt


def create_runner(model: Model) -> TensorFlowRunner:
    """Create a runner for `model` with its current edits."""
    return TensorFlowRunner(model, import_tensorflow())


def input_specs(model: Model, message: Any = None) -> Sequence[InputSpec]:
    """Return the inputs that a run must be fed: those of the signature or, without one, the placeholders.

    `message` is the emitted `model`, if the caller has it.
    """
    return tuple(entry.spec for entry in run_inputs(model, message))


def run_inputs(model: Model, message: Any = None) -> Sequence[SignatureInput]:
    """Return the inputs of a run with the tensors that their data feeds."""
    if (meta := _served_meta_graph(model, message)) is not None:
        return signature_inputs(model, meta)
    # Only placeholders that the outputs depend on must be fed.
    ancestors = set(reachable(model.main.outputs, model.main.predecessors))
    names = [name for name in model.main.inputs if name in ancestors and not model.main.slots(name)]
    return tuple(_placeholder_input(model, name) for name in names)


def output_fetches(model: Model, message: Any = None) -> dict[str, str]:
    """Return a run's outputs and their tensors. `message` is the emitted `model`, if the caller has it."""
    if (meta := _served_meta_graph(model, message)) is None:
        sources = {label: model.main.source_of(Use("", label, 0)) for label in model.main.outputs}
        return {label.removeprefix("@"): f"{ref.op}:{ref.port}" for label, ref in sources.items() if ref is not None}
    return signature_outputs(model, meta)


def _served_meta_graph(model: Model, message: Any) -> Any:
    """Return the MetaGraphDef whose signatures run; None if there are no signatures with outputs."""
    meta = model.source.meta_graph(emit(model) if message is None else message)
    return None if meta is None or not any(signatures_with_outputs(meta)) else meta


def served_signatures(model: Model, message: Any = None) -> tuple[FrozenSignature, ...]:
    """Return the signatures that run, with their placeholders. `message` is the emitted `model`, if known.

    The inputs and outputs of a graph without signatures are named after their ops.
    """
    if model.source.signatures:
        return tuple(model.source.signatures)
    if (meta := _served_meta_graph(model, message)) is None:
        inputs = {spec.name: spec.name for spec in input_specs(model, message)}
        return (FrozenSignature(name="serving_default", inputs=inputs, outputs=output_fetches(model, message)),)
    served = [(name, meta.signature_def[name]) for name in running_signatures(model, meta)]
    return tuple(
        FrozenSignature(
            name=name, inputs=signature_placeholders(model, name, signature), outputs=output_tensors(signature)
        )
        for name, signature in served
    )


def _placeholder_input(model: Model, name: str) -> SignatureInput:
    output, signatures = model.main.op(name).outputs[0], model.source.signatures
    keys = [(signature, key) for signature in signatures for key, op in signature.inputs.items() if op == name]
    # Data for the model before freezing feeds the frozen one too.
    sources = [signature.source_inputs[key] for signature, key in keys if key in signature.source_inputs]
    names = dict.fromkeys(f"{op}{port}" for op in (name, *sources, *(key for _, key in keys)) for port in ("", ":0"))
    spec = InputSpec(
        name=name,
        dtype=output.dtype or "float32",
        shape=output.shape,
        aliases=tuple(alias for alias in names if alias != name),
        signatures=tuple(signature.name for signature, _ in keys),
    )
    return SignatureInput(spec=spec, targets=(FedTensors(encoding="dense", ops=(name,)),))


class TensorFlowRunner:
    """Runs the signatures of a model or, without signatures, all tensors without readers."""

    def __init__(self, model: Model, module: Any) -> None:
        self._tf = module
        self.model = model
        message = emit(model, to_run=True)
        required_inputs = run_inputs(model, message)
        self.inputs: Sequence[InputSpec] = tuple(entry.spec for entry in required_inputs)
        self._fetches = output_fetches(model, message)
        self.outputs: Sequence[str] = tuple(self._fetches)  # the signature's keys, or the names of the tensors
        required = {spec.name for spec in self.inputs}
        main = model.main
        optional = [
            _placeholder_input(model, name) for name in main.inputs if name not in required and main.slots(name)
        ]
        all_inputs = (*optional, *required_inputs)
        self._inputs_by_key = {key: entry for entry in all_inputs for key in entry.spec.aliases}
        self._inputs_by_key |= {entry.spec.name: entry for entry in all_inputs}
        self._unfetchable = unfetchable_ops(model.main)
        self._output_watch: TensorWatch | None = None
        self._last_watch: TensorWatch | None = None
        self._sequence: RunSequence | None = None

    @cached_property
    def _session(self) -> TensorFlowSession:
        return TensorFlowSession(self._tf, self.model)

    def run(self, feeds: Feeds) -> dict[str, npt.NDArray[Any]]:
        """Return the model's outputs by name, for one feed. Inputs may be given by name or alias.

        An output on an untaken branch is omitted; an output inside a loop has its value of the last iteration. A model
        with state continues from the previous call.
        """
        if self._sequence is None:
            self._sequence = RunSequence(self._session)
        feed_dict = self._make_feed_dict(feeds)
        tensors = self.output_tensors
        if self._output_watch is None:
            try:
                return dict(zip(tensors, self._sequence.run(list(self._fetches.values()), feed_dict), strict=True))
            except ModelError:
                if not any(tensor.op in self._unfetchable for tensor in tensors.values()):
                    raise
            # An output that did not run is an error for TensorFlow. Any other error is raised again by the watch.
            self._output_watch = self._start_watch(list(tensors.values()))
        values = self._output_watch.observe(feed_dict)
        return {key: values[tensor][-1] for key, tensor in tensors.items() if values[tensor]}

    def run_each(self, feeds: Iterable[Feeds]) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Yield the outputs of each feed. A model with state starts with the initial one."""
        self.start_sequence()
        return map(self.run, feeds)

    def start_sequence(self) -> bool:
        """Let the next run start with the initial state. Return True if runs change variables."""
        self._sequence = None
        if self._output_watch is not None:
            self._output_watch.start_sequence()
        return self._session.has_state

    def prepare_timed_run(self, feeds: Sequence[Feeds]) -> Callable[[], object]:
        """Prepare a run on each of `feeds`, on one thread, with all of TensorFlow's optimizations."""
        session = TensorFlowSession(self._tf, self.model, for_timing=True)
        feed_dicts = [self._make_feed_dict(feed) for feed in feeds]
        target_ops = [session.operation(name) for name in self._fetches.values()]
        for feed_dict in feed_dicts:
            session.run(target_ops, feed_dict)
        return lambda: [session.tf_session.run(target_ops, feed_dict) for feed_dict in feed_dicts]

    @property
    def output_tensors(self) -> Mapping[str, TensorRef]:
        """The tensors that `outputs` name."""
        parts = {key: name.partition(":") for key, name in self._fetches.items()}
        return {key: TensorRef("", op, int(port or 0)) for key, (op, _, port) in parts.items()}

    def free_session(self, *, observing: bool = False, only_large: bool = True) -> None:
        """Do nothing: all runs share one session."""

    @staticmethod
    def unobservable(_tensors: Sequence[TensorRef]) -> dict[TensorRef, str]:
        """Return no tensors: queues can observe every function and frame."""
        return {}

    def element_counts(self, tensors: Sequence[TensorRef], feed: Feeds) -> dict[TensorRef, int]:
        """Return the element count of each tensor in one run of `feed`, over all iterations; 0 if it does not run."""
        with closing(self._start_watch(tensors, count_elements=True)) as watch:
            counts = watch.observe(self._make_feed_dict(feed))
        return {tensor: sum(map(int, values)) for tensor, values in counts.items()}

    def observe(
        self,
        tensors: Sequence[TensorRef],
        feeds: Iterable[Feeds],
        *,
        other_tensors: Sequence[TensorRef] = (),
        max_in_flight: int = 1,
        on_result: Callable[[dict[TensorRef, list[npt.NDArray[Any]]]], object] | None = None,
        ancestors_only: bool = False,
    ) -> Generator[dict[TensorRef, list[npt.NDArray[Any]]], None, None]:
        """Yield the values of each tensor, feed by feed; see `Runner.observe`.

        Runs never overlap, because a model may have state; the next feed runs while the values of one are processed.
        TensorFlow fuses ops with no observed tensor between them, so the sizes of `other_tensors` are fetched as well.
        """
        watch = None if other_tensors else self._last_watch
        if watch is None or not set(watch.tensors) >= set(tensors):
            if self._last_watch is not None:
                self._last_watch.close()
            # Other calls often observe the same tensors or the outputs, and a session takes longer than many runs.
            fetchable = [tensor for tensor in self.output_tensors.values() if tensor.op not in self._unfetchable]
            outputs = () if other_tensors or ancestors_only else fetchable
            watch = self._start_watch([*tensors, *outputs], other_tensors, ancestors_only=ancestors_only)
            self._last_watch = None if other_tensors or ancestors_only else watch
        watch.start_sequence()
        requested = list(dict.fromkeys(tensors))
        run = partial(watch.observe, tensors=requested)
        try:
            yield from prefetch(
                lambda feed: run(self._make_feed_dict(feed)), feeds, max_in_flight, on_result, threads=1
            )
        finally:
            if watch is not self._last_watch:
                watch.close()

    def _start_watch(
        self,
        tensors: Sequence[TensorRef],
        other_tensors: Sequence[TensorRef] = (),
        *,
        count_elements: bool = False,
        ancestors_only: bool = False,
    ) -> TensorWatch:
        """Start a watch of the values of `tensors`, or their element counts, and of counts of `other_tensors`."""
        watched = dict.fromkeys([*tensors, *other_tensors])
        counted = frozenset(watched if count_elements else other_tensors)
        direct = [tensor for tensor in watched if not tensor.graph and tensor.op not in self._unfetchable]
        live_graphs = set(self.model.reachable_graphs())
        hidden = self._unfetchable
        queued = [ref for ref in watched if ref.graph in live_graphs and (ref.graph or ref.op in hidden)]
        instrumented = instrument_with_queues(self.model, queued, counted) if queued else self.model
        session = TensorFlowSession(self._tf, instrumented) if queued else self._session
        dtypes = ["int64" if tensor in counted else self.model.output(tensor).dtype or "float32" for tensor in queued]
        names = {tensor: f"{tensor.op}:{tensor.port}" for tensor in direct}
        sizes = session.add_size_tensors({tensor: names[tensor] for tensor in direct if tensor in counted})
        return TensorWatch(
            session=session,
            owns_session=bool(queued),
            tensors=list(dict.fromkeys(tensors)),
            direct_fetches=names | sizes,
            sequence=RunSequence(session),
            queued_tensors=dict(zip(queued, session.add_queues(dtypes), strict=True)),
            # Outputs are run and not fetched: on the untaken branch of a TF1 cond they have no value.
            target_ops=[
                session.operation(name)
                for name in (
                    () if ancestors_only and not queued else output_fetches(instrumented, session.message).values()
                )
            ],
        )

    def _make_feed_dict(self, feeds: Feeds) -> dict[str, Any]:
        feed_dict: dict[str, Any] = {}
        for key, value in feeds.items():
            if (entry := self._inputs_by_key.get(key)) is None:
                raise DataError(
                    f"The data has {key!r}, which is not an input of the model. Its inputs are "
                    f"{', '.join(spec.name for spec in self.inputs)}.{did_you_mean(key, self._inputs_by_key)}"
                )
            spec = entry.spec
            shape = value.shape if spec.shape is None else spec.shape
            if len(shape) != len(value.shape) or any(
                size not in {None, actual} for size, actual in zip(shape, value.shape, strict=True)
            ):
                sizes = ", ".join("any" if size is None else str(size) for size in shape)
                raise DataError(
                    f"The data for {spec.name!r} has shape {value.shape}, but the model needs [{sizes}]. Reshape the"
                    " data."
                )
            for tensors in entry.targets:
                feed_dict.update({f"{op}:0": part for op, part in tensors.encode(value).items()})
        missing = [spec.name for spec in self.inputs if f"{spec.name}:0" not in feed_dict]
        if missing:
            raise DataError(f"The data lacks the model's input {missing[0]!r}. It has {', '.join(feeds) or 'nothing'}.")
        return feed_dict
