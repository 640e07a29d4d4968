"""SQNR of models that graphquant, ONNX Runtime and NNCF quantized, for `calibration.py`."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
from calibration_contestants import METHODS, Reader, feeds, nncf_quantize, session


def quantized(what: str, model: Path, data: Path, out: Path, nncf: str | None) -> None:
    """Writes `model` quantized by one of the tools."""
    if what == "NNCF":
        command = [str(nncf), __file__, str(model), str(data), str(out)]
        subprocess.run(command, capture_output=True, check=True)  # ourselves
        return
    tool, _, method = what.partition(" ")
    if tool == "graphquant":
        import graphquant as gq

        gq.insert(model, data=str(data), method=method, validate=False).save(out, force=True)
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


def worth(name: str, model: Path, data: Path, held_out: Path, nncf: str | None, folder: Path) -> dict[str, float]:
    """The third table: dB of each tool and method."""
    kinds = [
        *(f"graphquant {method}" for method in ("auto", "minmax", "mse", "percentile", "entropy", "mean-minmax")),
        *(f"onnxruntime {method}{granularity}" for method in METHODS for granularity in ("", "/channel")),
        *(["NNCF"] if nncf else []),
    ]
    print(f"\n{name:34} SQNR of the worst output, dB")
    found = {}
    for kind in kinds:
        out = folder / "quantized.onnx"
        quantized(kind, model, data, out, nncf)
        found[kind] = worst_sqnr(model, out, held_out)
        print(f"{kind:34} {found[kind]:6.2f}", flush=True)
    return found


if __name__ == "__main__":
    onnx.save(nncf_quantize(Path(sys.argv[1]), Path(sys.argv[2])), sys.argv[3])
