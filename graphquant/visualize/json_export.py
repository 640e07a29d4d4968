"""Results as versioned JSON data for `--format json` and `--report`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphquant.numerics import DynamicQParams
from graphquant.visualize import JSON_SCHEMA_VERSION
from graphquant.visualize.tables import select_fields
from graphquant.visualize.validation_report import search_json, validation_json

if TYPE_CHECKING:
    from graphquant.analysis.conversion_report import ConversionReport
    from graphquant.analysis.model_summary import ModelSummary, StoredScaleTensor
    from graphquant.api import Result
    from graphquant.ir import TensorRef, Use
    from graphquant.numerics import Array, QParams
    from graphquant.quantize import Conflict, RangeTransfer, Skip


def params_json(params: QParams | DynamicQParams | None) -> dict[str, Any]:
    """Return scale, zero point and range; "dynamic" if computed at run time."""
    if params is None:
        return {"dynamic": True}
    if isinstance(params, DynamicQParams):
        return {"dynamic": True, "dtype": params.type.name, "axis": params.axis, "narrow": params.narrow}
    return {
        "dtype": params.type.name,
        "scale": params.scale.astype(float).tolist(),
        "zero_point": params.zero_point.tolist(),
        "axis": params.axis,
        "block_size": params.block,
        "narrow": params.narrow,
        "low": params.range.low.tolist(),
        "high": params.range.high.tolist(),
    }


def tensor_json(tensor: TensorRef) -> dict[str, Any]:
    """Return a tensor as JSON data."""
    return select_fields(tensor, "graph", "op", "port")


def use_json(use: Use) -> dict[str, Any]:
    """Return a use as JSON data."""
    return select_fields(use, "graph", "op", "slot")


def skip_json(skip: Skip) -> dict[str, Any]:
    """Return a skip as JSON data."""
    uses = [use_json(use) for use in skip.uses]
    return {"tensor": tensor_json(skip.tensor), "uses": uses, "rule": skip.rule, "reason": skip.reason}


def ranges_json(ranges: RangeTransfer) -> dict[str, Any]:
    """Return the ranges taken from a TFLite file as JSON data."""
    return {
        "path": str(ranges.path) if ranges.path else None,
        "applied": [
            {"tensor": tensor_json(applied.tensor), "name": applied.name, "exact": applied.exact}
            for applied in ranges.transferred
        ],
        "unused": list(ranges.unused),
        "missing": [tensor_json(tensor) for tensor in ranges.missing],
    }


def conversion_json(conversion: ConversionReport) -> dict[str, Any]:
    """Return planned and actual parameters of a TFLite conversion as JSON data."""

    def scale_json(params: tuple[Array, Array] | None) -> dict[str, Any] | None:
        return None if params is None else {"scale": params[0].astype(float).tolist(), "zero_point": params[1].tolist()}

    return {
        "agrees": conversion.agrees,
        "tensors": [
            {
                "tensor": tensor_json(line.tensor),
                "name": line.name,
                "index": line.index,
                "planned": scale_json(line.planned),
                "runtime": scale_json(line.runtime),
                "problem": line.problem,
            }
            for line in conversion.tensors
        ],
        "op_count": conversion.op_count,
        "float_ops": [select_fields(op, "op", "type", "reason") for op in conversion.float_ops],
    }


def result_json(result: Result, output: str | None, conversion: ConversionReport | None = None) -> dict[str, Any]:
    """Return the report of `insert`, with the conversion report for TFLite."""
    return {
        "schema": JSON_SCHEMA_VERSION,
        "input": str(result.source.path) if result.source.path else None,
        "output": output,
        "format": result.source.format,
        "model": result.plan.model,
        "rules": list(result.plan.rules),
        "steps": [select_fields(step, "step", "target", "detail", "why") for step in result.plan.steps],
        "data": _calibration_json(result),
        "sites": [
            {
                "tensor": tensor_json(insertion.site.tensor),
                "uses": [use_json(use) for use in insertion.site.uses],
                "output": tensor_json(insertion.output),
                "outputs": [tensor_json(output) for output in insertion.outputs],
                "rule": insertion.site.rule,
                "why": insertion.site.why,
                "folded": insertion.folded,
                "method": insertion.site.scheme.observe.name,
                "note": result.site_notes.get(insertion.site.tensor, ""),
                "choices": list(choices),
                **params_json(insertion.params),
            }
            for insertion, choices in zip(result.inserted, result.scale_reasons, strict=True)
        ],
        "algorithms": [
            select_fields(applied, "algorithm", "target", "detail", "applied") for applied in result.algorithm_results
        ],
        "changes": [{"tensor": tensor_json(change.tensor), "message": change.message} for change in result.changes],
        "conflicts": [conflict_json(conflict) for conflict in result.conflicts],
        "activation_sqnr": [
            {"tensor": tensor_json(loss.tensor), "sqnr": round(loss.sqnr, 2), "clipped": loss.clipped}
            for loss in result.activation_sqnr
        ],
        "search": search_json(result.search),
        "validation": validation_json(result.validation),
        "skips": [skip_json(skip) for skip in result.skips],
        "unused": list(result.plan.unused),
        "ranges": None if result.tflite_ranges is None else ranges_json(result.tflite_ranges),
        "conversion": None if conversion is None else conversion_json(conversion),
    }


def conflict_json(conflict: Conflict) -> dict[str, Any]:
    """Return a conflict between two rules as JSON data."""
    return {
        "rules": list(conflict.rules),
        "tensors": [tensor_json(tensor) for tensor in conflict.tensors],
        "requested": list(conflict.wants),
        "resolution": conflict.resolution,
    }


def _calibration_json(result: Result) -> dict[str, Any]:
    """Return the origin of the activation ranges."""
    stats = result.stats
    return {
        "samples": result.calibration_samples,
        "random": result.has_random_data,
        "blocks": stats.blocks if stats else 0,
        "complete": stats.complete if stats else True,
        "digests": [run.data_digest for run in stats.runs] if stats else [],
        "stats": str(result.stats_path) if result.stats_path else None,
    }


def summary_json(summary: ModelSummary) -> dict[str, Any]:
    """Return the model summary of `inspect` as JSON data."""
    model = summary.model
    return {
        "schema": JSON_SCHEMA_VERSION,
        "path": str(model.path) if model.path else None,
        "format": model.format,
        "opset": model.opset or None,
        "digest": model.digest,
        "graphs": {name: len(graph) for name, graph in model.graphs.items() if name not in model.saved_functions},
        "unreachable_functions": list(summary.unreachable_functions),
        "function_clones": [select_fields(clone, "graph", "op", "kind", "reason") for clone in summary.float_clone_ops],
        "inputs": [_input_json(model.main.op(name)) for name in model.main.inputs],
        "outputs": list(model.main.outputs),
        "ops": summary.op_types,
        "quantization": [
            {
                **select_fields(reading, "graph", "op", "type", "consumers", "rule", "learned"),
                "tensor": tensor_json(reading.tensor),
                "round": reading.rounding,
                **params_json(reading.params),
            }
            for reading in summary.quantization_ops
        ],
        "tensors": [stored_tensor_json(stored_tensor) for stored_tensor in summary.tensors],
        "coverage": [select_fields(op, "graph", "op", "kind", "quantized", "reason") for op in summary.coverage],
    }


def stored_tensor_json(stored_tensor: StoredScaleTensor) -> dict[str, Any]:
    """Return a tensor that stores its own scale, with the keys of TFLite's interpreter."""
    stored = stored_tensor.stored
    scales, zero_points = stored.scale.astype(float).tolist(), stored.zero_point.tolist()
    shape_signature = stored.sizes if stored_tensor.output.shape is None else stored_tensor.output.shape
    return {
        "graph": stored_tensor.tensor.graph,
        "index": stored.index,
        "name": stored_tensor.output.name,
        "kind": stored_tensor.kind,
        "dtype": stored_tensor.output.dtype,
        "shape": list(stored.sizes),
        "shape_signature": [-1 if size is None else size for size in shape_signature],
        "quantization": [scales[0], zero_points[0]] if len(scales) == len(zero_points) == 1 else [0.0, 0],
        "quantization_parameters": {"scales": scales, "zero_points": zero_points, "quantized_dimension": stored.axis},
        "min": stored.low.astype(float).tolist(),
        "max": stored.high.astype(float).tolist(),
        "details": stored.details,
    }


def _input_json(op: Any) -> dict[str, Any]:
    output = op.outputs[0]
    return {"name": op.name, "dtype": output.dtype, "shape": None if output.shape is None else list(output.shape)}
