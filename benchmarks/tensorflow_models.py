"""Insert, reload, run, check and train every TensorFlow model of the sample models, the tests and `shared/models`.

Each model is quantized with the data that belongs to it or with seeded values, and TensorFlow runs the result.
`check` must have no findings, and the signatures must be those of the source. Saved functions that return the same as
the signature must still do so. If there are variables, five steps of gradient descent must change them but no range.
A model that TensorFlow itself cannot run is quantized without data, reloaded and checked::

    python benchmarks/tensorflow_models.py [NAME...]

It prints a table, and its exit code is 1 if a model fails. Models of a missing folder `shared/models` are skipped.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tensorflow_runs import LoadedModel, is_float, signature_form

import graphquant as gq
from graphquant.analysis.model_summary import summarize_model
from graphquant.calibration.data import as_data_spec, open_data
from graphquant.formats.tensorflow import input_specs

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # for the imports in functions

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.tflite_nets import ConvertedNet

MIN_SQNR = 10  # in dB

Case = tuple[Path, dict[str, Any]]
"""A model and its calibration data by input; "" stands for the only input."""

SAMPLES, SHARED = ROOT / "sample_models", ROOT.parent / "shared/models"


def normal(*shape: int, count: int = 32) -> Any:
    """Return samples of normal distribution, float32 (count, *shape)."""
    return np.random.default_rng(0).normal(0.5, 1, (count, *shape)).astype(np.float32)


def arrays(path: Path) -> dict[str, Any]:
    """Return the arrays of a file except for labels."""
    with np.load(path) as data:
        return {name: data[name][:100] for name in data.files if not name.startswith("label")}


def sample(name: str) -> Callable[[Path], Case]:
    """Return the builder of a sample model."""
    data = SAMPLES / f"{'_'.join(name.partition('.')[0].split('_')[:2])}_calib.npz"
    return lambda _: (SAMPLES / name, arrays(data))


def shared(model: str, data: str) -> Callable[[Path], Case]:
    """Return the builder of a shared model with its data file."""
    return lambda _: (
        SHARED / model,
        {signature_key(name): array for name, array in arrays(SHARED / data).items()} if SHARED.is_dir() else {},
    )


def signature_key(name: str) -> str:
    """Return the key of the default signature that the name of a tensor stands for."""
    return name.removeprefix("serving_default_").removesuffix(":0")


def faces(_: Path) -> Case:
    """Return the face detector of loops, with photographs."""
    path = SHARED / "mtcnn.pb"
    if not path.exists():
        return path, {}
    images = np.load(SHARED / "ultraface/images.npz")["rgb"][:8, ..., ::-1].astype(np.float32)
    values = {"min_size": 20, "thresholds": [0.6, 0.7, 0.7], "factor": 0.709}
    return path, {"input": images} | {name: np.float32([value] * len(images)) for name, value in values.items()}


def written(write: Callable[[Path], object], name: str, data: dict[str, Any]) -> Callable[[Path], Case]:
    """Return the builder of a model that `write` writes into a folder as `name`."""

    def build(folder: Path) -> Case:
        write(folder)
        return folder / name, data

    return build


def converted(build_net: Callable[[Path, Path, Path], ConvertedNet]) -> Callable[[Path], Case]:
    """Return the builder of a net of the tests of TFLite files."""

    def build(folder: Path) -> Case:
        net = build_net(SAMPLES, SHARED, folder)
        return net.path, arrays(Path(net.data))

    return build


def cases() -> dict[str, Callable[[Path], Case]]:
    """Return functions that write each model into a folder, or return the path of an existing one, with its data."""
    from support import stand_ins, tensorflow_models, tflite_nets

    texts, images = (normal(size) for size in (tensorflow_models.TEXT_SIZE, tensorflow_models.IMAGE_SIZE))
    signatures: dict[str, dict[str, Any]] = {
        "shared": {"x": texts},
        "towers": {"text": {"x": texts}, "image": {"x": images}},
        "sparse": {"sp": texts, "rows": texts},
        "flattened": {"sp": texts},
        "ragged": {"rows": texts},
    }
    samples = ("cnn.pb", "cnn.pbtxt", "cnn_saved_model", "rnn.pb", "rnn_saved_model")
    loop_feeds = {name: np.stack([value] * 8) for name, value in stand_ins.loop_detector_feeds().items()}
    nets: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
        "clones": (tensorflow_models.write_module_with_clones, {"x": normal(8, 8, 3)}),
        "branches": (tensorflow_models.write_branching_module, {"x": normal(8)}),
        "gate": (tensorflow_models.write_gate, {"": normal(8, 8, 3)}),
        "training_graph": (tensorflow_models.write_training_graph, {"x": normal(8)}),
    }

    def write_keras(folder: Path) -> None:
        for suffix in (".keras", ".h5"):
            tensorflow_models.keras_network().save(folder / f"net{suffix}")
        for policy in ("mixed_float16", "mixed_bfloat16", "float16", "bfloat16"):
            tensorflow_models.half_precision_network(policy, folder / f"{policy}.keras")

    keras = ["net.keras", "net.h5", "mixed_float16.keras", "mixed_bfloat16.keras", "float16.keras", "bfloat16.keras"]
    return {
        **{f"digits_{name}": sample(f"digits_{name}") for name in samples},
        **{
            net.__name__: converted(net)
            for net in tflite_nets.NETS
            if net.__name__ not in {"kws", "digits_cnn", "digits_rnn"}
        },
        **{name: written(tensorflow_models.write_signature_models, name, data) for name, data in signatures.items()},
        **{
            name: written(lambda folder, write=write: write(folder / "net"), "net", data)
            for name, (write, data) in nets.items()
        },
        "tensorflow_1": written(tensorflow_models.write_tensorflow_1_net, "saved_model", {"image": normal(8, 8, 3)}),
        "meta_graph": written(tensorflow_models.write_tensorflow_1_net, "net.meta", {"image": normal(8, 8, 3)}),
        "loop_detector": written(lambda folder: stand_ins.write_loop_detector(folder / "net.pb"), "net.pb", loop_feeds),
        **{
            name: written(
                write_keras, name, {"image": normal(8, 8, 1)} if name.startswith("net") else {"x": normal(8, 8, 3)}
            )
            for name in keras
        },
        "kws": shared("kws/saved_model", "kws/calib.npz"),
        "dtln": shared("dtln/saved_model", "dtln/saved_model_calib.npz"),
        "basic_pitch": shared("basic_pitch/saved_model", "basic_pitch/calib.npz"),
        "mtcnn": faces,
        "taxi": lambda _: (SHARED / "odd/taxi_tfma_saved_model", {}),  # TensorFlow lacks a kernel for it
        "t2o_regression": lambda _: (SHARED / "odd/t2o_regression_saved_model", {"X": normal()}),
    }


def ranges(model: gq.Model) -> list[str]:
    """Return the quantization ops of a model with their parameters, sorted."""
    return sorted(f"{row.op} {row.params}" for row in summarize_model(model).distinct_ops)


def examine(path: Path, data: dict[str, Any], folder: Path) -> tuple[list[object], list[str]]:
    """Quantize a model and examine the result. Return the figures of the table and the failures."""
    data = {key or input_specs(gq.load(path))[0].name: value for key, value in data.items()}
    result = gq.insert(path, validate=False, allow_empty=True, **({"data": data} if data else {"rules": "weight_only"}))
    is_folder = path.is_dir() or path.suffix in {".keras", ".h5"}
    model = gq.load(result.save(folder / f"quantized{'' if is_folder else path.suffix}"))
    failures = [f"check: {finding.code} {finding.message}" for finding in gq.check(model).findings]
    if ranges(result.model) != ranges(model):
        failures.append("the reloaded model has other pairs")
    if signature_form(result.source) != signature_form(model):
        failures.append("the signatures in the file differ")
    figures = run(result.source, model, data, folder, failures) if data else ["not run", "-", "-", "-", "-"]
    return [len(result.inserted), *figures], failures


def run(source: gq.Model, model: gq.Model, data: dict[str, Any], folder: Path, failures: list[str]) -> list[object]:
    """Run and train both models in TensorFlow. Return the figures of the table, and extend `failures`."""
    samples = [*open_data(as_data_spec(data), input_specs(source)).feeds_between(0, 4)]
    before, after = LoadedModel(source, source, samples), LoadedModel(model, source, samples)
    if before.structure() != after.structure():
        failures.append("the loaded signatures differ")
    sqnr = compare_outputs(before.run(), after.run(), failures)
    copies = before.equal_functions()
    failures += [f"{name} differs from its signature now" for name in sorted(copies - after.equal_functions())]
    losses = after.train()
    if losses and not (np.isfinite(losses).all() and after.changed_variables):
        failures.append(f"{after.changed_variables} variables changed, and the losses are {losses}")
    if losses and ranges(gq.load(after.save_trained(folder / "trained"))) != ranges(model):
        failures.append("training changed ranges")
    loss = f"{losses[0]:.3g} to {losses[-1]:.3g}" if losses else "-"
    return [after.loader, sqnr, len(copies), loss, after.changed_variables]


def compare_outputs(expected: list[dict[str, Any]], actual: list[dict[str, Any]], failures: list[str]) -> str:
    """Return the lowest SQNR of float outputs, and add differences in type, shape and finite values to `failures`."""
    errors: dict[str, list[Any]] = {}
    for before, after in zip(expected, actual, strict=True):
        for (name, value), result in zip(before.items(), after.values(), strict=True):
            if value.ndim != result.ndim or value.dtype != result.dtype or not np.isfinite(result).all():
                failures.append(f"output {name}: {value.dtype}{value.shape} is now {result.dtype}{result.shape}")
            elif is_float(value) and value.shape == result.shape:  # a detector may find fewer boxes
                signal, noise = value.astype(float), (value.astype(float) - result.astype(float))
                errors.setdefault(name, []).append([(signal**2).sum(), (noise**2).sum()])
    with np.errstate(divide="ignore", invalid="ignore"):
        sqnr = {name: 10 * np.log10(np.divide(*np.sum(sums, 0))) for name, sums in errors.items()}
    failures += [f"output {name} has an SQNR of {value:.1f} dB" for name, value in sqnr.items() if not value > MIN_SQNR]
    return f"{min(sqnr.values()):.1f}" if sqnr else "-"


def main() -> None:
    """Examine the chosen models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = cases()
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"Default: all. Names: {', '.join(models)}.")
    names = parser.parse_args().names or list(models)
    warnings.simplefilter("ignore")
    layout = "{:24} {:>6} {:>8} {:>8} {:>10} {:>22} {:>10}  {}".format
    print(layout("model", "pairs", "loader", "SQNR, dB", "functions", "loss of five steps", "variables", "result"))
    failed = False
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "work").mkdir()
            path, data = models[name](Path(folder))
            if not path.exists():
                print(layout(name, *["-"] * 6, "skipped: the file does not exist"))
                continue
            try:
                figures, failures = examine(path, data, Path(folder, "work"))
            except Exception as error:  # noqa: BLE001  # the errors of TensorFlow have no common class
                figures, failures = ["-"] * 6, [f"{type(error).__name__}: {error}"[:400]]
        failed |= bool(failures)
        print(layout(name, *figures, "ok" if not failures else f"failed: {'; '.join(failures)}"), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
