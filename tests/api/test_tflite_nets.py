"""Conversion of nine nets to TFLite: types, signatures, the report, and accuracy beside that of TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.measurements import print_measurement, sqnr_db
from support.tflite_nets import NETS, ConvertedNet, digits_rnn, kws, lstm, unet

import graphquant as gq
from graphquant.formats.tensorflow.tflite_converter import add_signatures
from graphquant.quantize import prepare, transfer_ranges

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

Array = np.ndarray[Any, Any]

MIN_AGREEMENT, MIN_SQNR_DB, MAX_LOSS_DB = 0.98, 20.0, 0.5
OUTPUT_STEP_DB = 70.0  # above this, the steps of 1/32768 of probabilities, which both files have, are most of the error


def real_outputs(data: bytes, signature: str, samples: dict[str, Array]) -> tuple[dict[str, Array], set[str]]:
    """Return the real outputs of a signature for single samples, and the types of its inputs and outputs."""
    import tensorflow as tf

    run = tf.lite.Interpreter(model_content=data, num_threads=1).get_signature_runner(signature)
    inputs, outputs = run.get_input_details(), run.get_output_details()

    def stored(detail: dict[str, Any], value: Array) -> Array:
        scale, zero = detail["quantization"]
        if not scale:
            return value.astype(detail["dtype"])
        limits = np.iinfo(detail["dtype"])
        return np.clip(np.round(value / scale) + zero, limits.min, limits.max).astype(detail["dtype"])

    def real(detail: dict[str, Any], value: Array) -> Array:
        scale, zero = detail["quantization"]
        return (value.astype(np.float64) - zero) * scale if scale else value.astype(np.float64)

    count = len(next(iter(samples.values())))
    runs = [run(**{key: stored(inputs[key], samples[key][i : i + 1]) for key in inputs}) for i in range(count)]
    results = {key: np.concatenate([real(outputs[key], values[key]) for values in runs]) for key in outputs}
    return results, {np.dtype(detail["dtype"]).name for detail in (*inputs.values(), *outputs.values())}


def float_outputs(net: ConvertedNet, signature: str) -> dict[str, Array]:
    """Return the outputs of the float model for single samples."""
    import tensorflow as tf

    v1 = tf.compat.v1
    count = len(next(iter(net.samples.values())))
    if net.path.name == "net":
        serve = tf.saved_model.load(str(net.path)).signatures[signature]
        runs = [
            serve(**{key: tf.constant(value[i : i + 1]) for key, value in net.samples.items()}) for i in range(count)
        ]
        return {key: np.concatenate([values[key].numpy() for values in runs]) for key in runs[0]}
    # TensorFlow 2 cannot load the published model, because of the slots of its optimizer.
    with v1.Session(graph=v1.Graph()) as session:
        definition = v1.saved_model.load(session, ["serve"], str(net.path)).signature_def[signature]
        fetches = {key: info.name for key, info in definition.outputs.items()}
        runs = [
            session.run(fetches, {definition.inputs[key].name: value[i : i + 1] for key, value in net.samples.items()})
            for i in range(count)
        ]
    return {key: np.concatenate([values[key] for values in runs]) for key in fetches}


def converted_by_tensorflow(frozen: gq.Model, net: ConvertedNet, dtype: str) -> bytes:
    """Return the file that TensorFlow's converter makes of the frozen float graph with the same samples."""
    import tensorflow as tf

    v1, graph_def = tf.compat.v1, tf.compat.v1.GraphDef.FromString(frozen.source.message.SerializeToString())
    function = v1.wrap_function(lambda: v1.import_graph_def(graph_def, name=""), [])
    (signature, *_) = frozen.source.signatures
    feeds = [function.graph.as_graph_element(f"{name}:0") for name in signature.inputs.values()]
    fetches = [function.graph.as_graph_element(name) for name in signature.outputs.values()]
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function.prune(feeds, fetches)])
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    arrays = np.load(net.data)
    converter.representative_dataset = lambda: (
        [arrays[key][i : i + 1] for key in signature.inputs] for i in range(len(arrays[next(iter(signature.inputs))]))
    )
    converter.inference_input_type = converter.inference_output_type = tf.as_dtype(dtype)
    if dtype == "int16":
        op_sets = tf.lite.OpsSet
        converter.target_spec.supported_ops = [
            op_sets.EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8,
            op_sets.TFLITE_BUILTINS,
        ]
    return add_signatures(converter.convert(), [signature])


@pytest.fixture(scope="module", params=NETS)
def built_net(
    request: pytest.FixtureRequest, samples: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Callable[..., ConvertedNet], ConvertedNet]:
    """Return each function of a net with the net, which takes longer to train than to convert."""
    pytest.importorskip("tensorflow")
    folder = tmp_path_factory.mktemp("net")
    shared = request.getfixturevalue("shared") if request.param is kws else folder
    return request.param, request.param(samples, shared, folder)


@pytest.mark.parametrize(("rules", "dtype"), [("tflite", "int8"), ("tflite16", "int16")])
def test_net_keeps_its_accuracy_and_signatures(
    built_net: tuple[Callable[..., ConvertedNet], ConvertedNet], rules: str, dtype: str, tmp_path: Path
) -> None:
    """Inputs and outputs are integers, no line of the report is a difference, and accuracy holds in each signature."""
    import tensorflow as tf

    build, net = built_net
    frozen = gq.freeze(gq.load(net.path))
    result = gq.insert(frozen, rules=[rules], data=net.data, validate=False)
    conversion = gq.convert_to_tflite(result, tmp_path / "net.tflite")
    assert [(str(line.tensor), line.problem) for line in conversion.tensors if line.problem] == []
    data = (tmp_path / "net.tflite").read_bytes()
    known = tf.lite.Interpreter(model_content=data).get_signature_list()
    assert known.keys() >= set(net.signatures)
    plan = gq.plan(frozen, rules=[rules])
    prepared, _ = prepare(frozen, [step.step for step in plan.steps])
    _, transfer = transfer_ranges(prepared, plan, gq.load(tmp_path / "net.tflite"), {})
    theirs = None
    if build in {digits_rnn, lstm}:  # TensorFlow's converter refuses the free batch size of recurrent nets
        assert all("ReadVariableOp" in tensor.op for tensor in transfer.missing)
    else:
        assert transfer.missing == ()
    if build not in {digits_rnn, lstm} and not (build is unet and rules == "tflite16"):  # it has no Tile of int16
        theirs, _ = real_outputs(converted_by_tensorflow(frozen, net, dtype), net.signatures[0], net.samples)
    for signature in net.signatures:
        expected = float_outputs(net, signature)
        results, types = real_outputs(data, signature, net.samples)
        assert types == {dtype}
        assert results.keys() == expected.keys()
        for key, values in expected.items():
            agreement = float((values.argmax(-1) == results[key].argmax(-1)).mean())
            quality = sqnr_db(values, results[key])
            reference = None if theirs is None or key not in theirs else sqnr_db(values, theirs[key])
            print_measurement(
                f"{build.__name__} {rules} {signature} {key}: {quality:.1f} dB,"
                f" TensorFlow {reference or np.nan:.1f} dB, agreement {agreement:.3f}"
            )
            assert agreement >= MIN_AGREEMENT or quality >= MIN_SQNR_DB
            assert reference is None or quality >= min(reference - MAX_LOSS_DB, OUTPUT_STEP_DB)
