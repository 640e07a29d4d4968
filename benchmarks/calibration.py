"""What calibration costs beside the plain forward passes, and what its ranges are worth, with peers in the same run.

Run with `python benchmarks/calibration.py` (about half an hour). `--models FOLDER` holds the face detector and the
keyword net, `--nncf PYTHON` is an interpreter that has NNCF, `--quick` takes fewer samples and no repeats. Every
figure is measured in a process of its own, in turn with its peers, and is the median of the repeats.

1. time: plain passes (f), passes that fetch every planned tensor (o), graphquant's min-max and its whole sketch,
   onnxruntime's three calibration methods, and NNCF's.
2. memory: the peak above the plain passes, at 100 and 1,000 samples.
3. worth: SQNR of the outputs of the quantized model against the float one, on samples that calibration did not see.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Feed = dict[str, np.ndarray]

METHODS = ("MinMax", "Percentile", "Entropy")
ROOT = Path(__file__).resolve().parents[1]
THREADS = 2


# -- models and data -------------------------------------------------------------------------------


def photographs(folder: Path, count: int, start: int = 0) -> Iterator[np.ndarray]:
    """Face detector samples [1, 3, 240, 320]: photographs, each as it is and four times flipped and cropped."""
    rgb = np.load(folder / "ultraface/images.npz")["rgb"]
    rng = np.random.default_rng(0)
    made = 0
    while made < count:
        for picture in rgb[start:] if start else rgb[:20]:
            for variant in range(5):
                if made == count:
                    return
                made += 1
                view = picture[:, ::-1] if rng.random() < 0.5 and variant else picture  # noqa: PLR2004  # a coin
                if variant:
                    top, left = rng.integers(0, 25), rng.integers(0, 33)
                    rows = np.linspace(top, top + 215, 240).astype(int)
                    columns = np.linspace(left, left + 287, 320).astype(int)
                    view = view[rows][:, columns]
                yield ((view.astype(np.float32) - 127) / 128).transpose(2, 0, 1)[None]


def resnet50(path: Path) -> None:
    """A ResNet-50 with seeded weights, scaled so that activations keep their size, BatchNorms folded already."""
    rng = np.random.default_rng(1)
    nodes, weights = [], []

    def conv(x: str, name: str, channels: tuple[int, int], size: int, stride: int, gain: float = 2.0) -> str:
        shape = (channels[1], channels[0], size, size)
        scale = np.sqrt(gain / (channels[0] * size * size))
        weights.append(numpy_helper.from_array(rng.normal(0, scale, shape).astype(np.float32), f"{name}.weight"))
        bias = rng.normal(0, 0.1, channels[1]).astype(np.float32)
        weights.append(numpy_helper.from_array(bias, f"{name}.bias"))
        nodes.append(
            helper.make_node(
                "Conv",
                [x, f"{name}.weight", f"{name}.bias"],
                [name],
                name=name,
                kernel_shape=[size, size],
                strides=[stride, stride],
                pads=[size // 2] * 4,
            )
        )
        return name

    def op(kind: str, name: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    x = op("Relu", "stem/relu", conv("x", "stem", (3, 64), 7, 2))
    x = op("MaxPool", "stem/pool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            at, stride = f"s{stage}b{block}", 2 if stage and not block else 1
            y = op("Relu", f"{at}/r1", conv(x, f"{at}/c1", (channels, width), 1, 1))
            y = op("Relu", f"{at}/r2", conv(y, f"{at}/c2", (width, width), 3, stride))
            y = conv(y, f"{at}/c3", (width, 4 * width), 1, 1, gain=0.5)
            if not block:
                x = conv(x, f"{at}/down", (channels, 4 * width), 1, stride, gain=1.0)
            channels = 4 * width
            x = op("Relu", f"{at}/out", op("Add", f"{at}/add", y, x))
    x = op("Flatten", "flat", op("GlobalAveragePool", "pool", x))
    weights.append(numpy_helper.from_array(rng.normal(0, 0.02, (2048, 1000)).astype(np.float32), "fc.weight"))
    weights.append(numpy_helper.from_array(np.zeros(1000, np.float32), "fc.bias"))
    op("Gemm", "y", x, "fc.weight", "fc.bias")
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "resnet50",
        [info("x", TensorProto.FLOAT, [1, 3, 224, 224])],
        [info("y", TensorProto.FLOAT, [1, 1000])],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def keywords(folder: Path, path: Path) -> None:
    """The keyword net as ONNX: frozen by TensorFlow's TF1 loader, then converted."""
    import tensorflow as tf
    import tf2onnx

    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(folder / "kws/saved_model"))
        signature = meta.signature_def["serving_default"]
        (source,), (result,) = signature.inputs.values(), signature.outputs.values()
        frozen = tf.compat.v1.graph_util.convert_variables_to_constants(
            session, session.graph_def, [result.name.split(":")[0]]
        )
    tf2onnx.convert.from_graph_def(
        frozen, input_names=[source.name], output_names=[result.name], opset=17, output_path=str(path)
    )


def noise(count: int) -> Iterator[np.ndarray]:
    """Samples [1, 3, 224, 224]: smooth seeded noise, about as correlated as photographs."""
    rng = np.random.default_rng(2)
    for _ in range(count):
        coarse = rng.standard_normal((1, 3, 28, 28)).astype(np.float32)
        yield coarse.repeat(8, axis=2).repeat(8, axis=3) + 0.1 * rng.standard_normal((1, 3, 224, 224), np.float32)


# -- one measurement, in a process of its own ------------------------------------------------------


def feeds(model: Path, data: Path) -> Iterator[Feed]:
    """The samples of `data`, read as calibration reads them."""
    from graphquant import formats, pipeline
    from graphquant.data import open_data

    runner = formats.module("onnx").runner(pipeline.load(model))
    yield from open_data(str(data), runner.inputs)


def session(model: Path | bytes) -> Any:
    """A session with the settings that graphquant uses."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
    made = model if isinstance(model, bytes) else str(model)
    return onnxruntime.InferenceSession(made, options, providers=["CPUExecutionProvider"])


def planned(model: Path) -> tuple[Path, list[str]]:
    """The prepared model that calibration runs, and the values it fetches of it."""
    from graphquant import pipeline
    from graphquant.calibration import needs_data

    loaded = pipeline.load(model)
    plan = pipeline.plan(loaded)
    prepared = pipeline._prepared_for(loaded, plan)  # noqa: SLF001  # what calibration runs
    path = model.with_name(f"{model.stem}.prepared.onnx")
    pipeline.save(prepared, path, force=True)
    names = [prepared.output(site.tensor).name or str(site.tensor) for site in needs_data(plan)]
    return path, list(dict.fromkeys(names))


def plain(model: Path, data: Path) -> Callable[[], object]:
    """(f): the forward passes alone."""
    prepared, _ = planned(model)

    def run() -> None:
        started = session(prepared)
        for feed in feeds(model, data):
            started.run(None, feed)

    return run


def fetching(model: Path, data: Path) -> Callable[[], object]:
    """(o): the forward passes, every planned tensor fetched."""
    prepared, names = planned(model)
    message = onnx.load(prepared)
    inputs = {info.name for info in message.graph.input}
    have = {info.name for info in message.graph.output}
    wanted = [name for name in names if name not in inputs]
    message.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in have)
    made = message.SerializeToString()

    def run() -> None:
        started = session(made)
        for feed in feeds(model, data):
            started.run(wanted, feed)

    return run


def graphquant(model: Path, data: Path, method: str) -> Callable[[], object]:
    """Calibration by graphquant: min-max alone, or the whole sketch."""
    from graphquant import pipeline
    from graphquant.calibration import with_method

    loaded = pipeline.load(model)
    plan = with_method(pipeline.plan(loaded), method)
    return lambda: pipeline.calibrate(loaded, plan, str(data), full=method != "minmax")


def onnxruntime_static(model: Path, data: Path, method: str) -> Callable[[], object]:
    """Calibration by onnxruntime, without the insertion that follows."""
    from onnxruntime.quantization import CalibrationMethod, create_calibrator

    prepared, _ = planned(model)

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder:
            calibrator = create_calibrator(
                str(prepared),
                augmented_model_path=str(Path(folder, "augmented.onnx")),
                calibrate_method=CalibrationMethod[method],
            )
            calibrator.collect_data(Reader(feeds(model, data)))
            calibrator.compute_data()

    return run


class Reader:
    """Samples as onnxruntime wants them."""

    def __init__(self, samples: Iterator[Feed]) -> None:
        self.samples = samples

    def get_next(self) -> Feed | None:
        """The next sample."""
        return next(self.samples, None)


WORKERS: dict[str, Callable[[Path, Path], Callable[[], object]]] = {
    "f": plain,
    "o": fetching,
    "graphquant minmax": lambda model, data: graphquant(model, data, "minmax"),
    "graphquant sketch": lambda model, data: graphquant(model, data, "auto"),
    **{
        f"onnxruntime {method}": lambda model, data, method=method: onnxruntime_static(model, data, method)  # type: ignore[misc]
        for method in METHODS
    },
}


def nncf_statistics(model: Path, data: Path) -> Callable[[], object]:
    """Calibration by NNCF: its statistics collection, which it runs within `nncf.quantize`."""
    from nncf.common.tensor_statistics.aggregator import StatisticsAggregator

    spent = [0.0]
    original = StatisticsAggregator.collect_statistics

    def timed(self: Any, *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(self, *arguments)
        finally:
            spent[0] += time.perf_counter() - start

    StatisticsAggregator.collect_statistics = timed

    def run() -> float:
        nncf_quantize(model, data)
        return spent[0]

    return run


def nncf_quantize(model: Path, data: Path) -> Any:
    """NNCF's quantized model, its defaults."""
    import nncf

    with np.load(data) as arrays:
        samples = {name: arrays[name] for name in arrays.files}
    count = len(next(iter(samples.values())))
    made = [{name: array[index : index + 1] for name, array in samples.items()} for index in range(count)]
    nncf.set_log_level("ERROR")
    return nncf.quantize(onnx.load(model), nncf.Dataset(made), subset_size=count)


def measure(what: str, model: Path, data: Path) -> dict[str, float]:
    """Seconds of one run, imports and preparation left out, and the process's peak memory in MB."""
    run = nncf_statistics(model, data) if what == "NNCF" else WORKERS[what](model, data)
    gc.collect()
    start = time.perf_counter()
    told = run()
    seconds = told if isinstance(told, float) else time.perf_counter() - start
    return {"seconds": seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def worker(what: str, model: Path, data: Path, python: str = sys.executable) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [python, __file__, "--worker", what, str(model), str(data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # ourselves
    if done.returncode:
        raise SystemExit(f"{what} failed on {model.name}:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


# -- what the ranges are worth ---------------------------------------------------------------------


def quantized(what: str, model: Path, data: Path, out: Path, nncf: str | None) -> None:
    """Writes `model` quantized by one of the tools."""
    if what == "NNCF":
        command = [str(nncf), __file__, "--quantize", str(model), str(data), str(out)]
        subprocess.run(command, capture_output=True, check=True)  # ourselves
        return
    tool, _, method = what.partition(" ")
    if tool == "graphquant":
        from graphquant import pipeline

        pipeline.insert(model, data=str(data), method=method).save(out, force=True)
        return
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, quantize_static

    with contextlib.redirect_stdout(io.StringIO()):
        quantize_static(
            str(model),
            str(out),
            Reader(feeds(model, data)),  # type: ignore[arg-type]
            quant_format=QuantFormat.QDQ,
            per_channel=method.endswith("/channel"),
            calibrate_method=CalibrationMethod[method.removesuffix("/channel")],
        )


def worst_sqnr(model: Path, other: Path, data: Path) -> float:
    """SQNR in dB over all samples of the worst of the outputs."""
    one, two = session(model), session(other)
    power, error = None, None
    for feed in feeds(model, data):
        expected, found = one.run(None, feed), two.run(None, feed)
        squares = np.array([np.square(value, dtype=np.float64).sum() for value in expected])
        pairs = zip(expected, found, strict=True)
        wrong = np.array([np.square(np.subtract(a, b, dtype=np.float64)).sum() for a, b in pairs])
        power = squares if power is None else power + squares
        error = wrong if error is None else error + wrong
    return float((10 * np.log10(power / np.maximum(error, 1e-300))).min())


# -- the tables ------------------------------------------------------------------------------------


def times(name: str, model: Path, data: Path, nncf: str | None, repeats: int) -> None:
    """The first table."""
    kinds = [*WORKERS, *(["NNCF"] if nncf else [])]
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    prepared, _ = planned(model)  # NNCF takes no opset below 10
    for _ in range(repeats):
        for kind in kinds:
            runs[kind].append(
                worker(
                    kind,
                    prepared if kind == "NNCF" else model,
                    data,
                    nncf if kind == "NNCF" and nncf else sys.executable,
                )
            )
    seconds = {kind: statistics.median(run["seconds"] for run in runs[kind]) for kind in kinds}
    peaks = {kind: statistics.median(run["peak"] for run in runs[kind]) for kind in kinds}
    least = {kind: min(run["seconds"] for run in runs[kind]) for kind in kinds}
    most = {kind: max(run["seconds"] for run in runs[kind]) for kind in kinds}
    f, o = seconds["f"], seconds["o"]
    print(
        f"\n{name:34} {'seconds':>8} {'(min to max)':>16} {'of f':>6} {'of o':>6} {'beyond o':>9} {'peak above f':>13}"
    )
    for kind in kinds:
        span = f"({least[kind]:.2f} to {most[kind]:.2f})"
        beyond = seconds[kind] - o
        print(
            f"{kind:34} {seconds[kind]:8.2f} {span:>16} {seconds[kind] / f:6.2f} {seconds[kind] / o:6.2f}"
            f" {beyond:9.2f} {peaks[kind] - peaks['f']:10.0f} MB",
            flush=True,
        )
    for ours in ("graphquant minmax", "graphquant sketch"):
        shares = ", ".join(
            f"{(seconds[ours] - o) / (seconds[f'onnxruntime {method}'] - o):.3f} of {method}'s" for method in METHODS
        )
        print(f"{ours}, time beyond o: {shares}", flush=True)


def memory(name: str, model: Path, small: Path, large: Path) -> None:
    """The second table."""
    print(f"\n{name:34} {'100 samples':>12} {'1000 samples':>13}   peak memory in MB, and above the plain passes")
    plain_peaks = [worker("f", model, data)["peak"] for data in (small, large)]
    for kind in ("graphquant minmax", "graphquant sketch"):
        peaks = [worker(kind, model, data)["peak"] for data in (small, large)]
        above = [peak - base for peak, base in zip(peaks, plain_peaks, strict=True)]
        print(f"{kind:34} {peaks[0]:12.0f} {peaks[1]:13.0f}   {above[0]:6.0f} {above[1]:6.0f}", flush=True)
    peer = worker("onnxruntime Percentile", model, small)["peak"]
    print(f"{'onnxruntime Percentile':34} {peer:12.0f} {'':13}   {peer - plain_peaks[0]:6.0f}", flush=True)


def worth(name: str, model: Path, data: Path, held_out: Path, nncf: str | None, folder: Path) -> None:
    """The third table."""
    kinds = [
        *(f"graphquant {method}" for method in ("auto", "minmax", "mse", "percentile", "entropy", "mean-minmax")),
        *(f"onnxruntime {method}{granularity}" for method in METHODS for granularity in ("", "/channel")),
        *(["NNCF"] if nncf else []),
    ]
    prepared, _ = planned(model)
    print(f"\n{name:34} SQNR of the worst output, dB")
    for kind in kinds:
        out = folder / "quantized.onnx"
        quantized(kind, model if kind.startswith("graphquant") else prepared, data, out, nncf)
        print(f"{kind:34} {worst_sqnr(model, out, held_out):6.2f}", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=ROOT.parent / "shared/models", help="the real models")
    parser.add_argument("--nncf", help="an interpreter that has NNCF")
    parser.add_argument("--quick", action="store_true", help="few samples, no repeats")
    parser.add_argument("--only", choices=["time", "memory", "worth"], help="one of the tables")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--quantize", nargs=3, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        what, model, data = options.worker
        print(json.dumps(measure(what, Path(model), Path(data))))
        return
    if options.quantize:
        model, data, out = options.quantize
        onnx.save(nncf_quantize(model, data), out)
        return
    samples, repeats = (10, 1) if options.quick else (100, 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = list(models(options.models, folder, samples))
        for title, model, data, _ in cases:
            if options.only in {None, "time"} and title != "keyword net":
                times(title, model, data, options.nncf, repeats)
        if options.only in {None, "memory"}:
            title, model, data, _ = cases[0]
            large = folder / "large.npz"
            np.savez(large, **{key: np.concatenate([value] * 10) for key, value in np.load(data).items()})
            memory(title, model, data, large)
        for title, model, data, held_out in cases:
            if options.only in {None, "worth"} and held_out is not None:
                worth(title, model, data, held_out, options.nncf, folder)


def models(given: Path, folder: Path, samples: int) -> Iterator[tuple[str, Path, Path, Path | None]]:
    """Title, model, calibration data and data that calibration does not see."""
    if given.is_dir():
        detector, data, held_out = given / "ultraface/version-RFB-320.onnx", folder / "faces.npz", folder / "others.npz"
        path = folder / "detector.onnx"
        path.write_bytes(detector.read_bytes())
        np.savez(data, input=np.concatenate(list(photographs(given, samples))))
        np.savez(held_out, input=np.concatenate(list(photographs(given, 25, start=20))))
        yield "face detector", path, data, held_out
        keywords(given, folder / "keywords.onnx")
        key = onnx.load(folder / "keywords.onnx").graph.input[0].name
        for source, target in (("calib", "words.npz"), ("eval", "other_words.npz")):
            with np.load(given / f"kws/{source}.npz") as arrays:
                array = next(arrays[name] for name in arrays.files if arrays[name].ndim == 4)  # noqa: PLR2004  # NHWC
                np.savez(folder / target, **{key: array[:samples] if source == "calib" else array})
        yield "keyword net", folder / "keywords.onnx", folder / "words.npz", folder / "other_words.npz"
    resnet50(folder / "resnet50.onnx")
    np.savez(folder / "noise.npz", x=np.concatenate(list(noise(samples))))
    yield "ResNet-50", folder / "resnet50.onnx", folder / "noise.npz", None


if __name__ == "__main__":
    main()
