"""Results as JSON data, versioned: what `--format json` and `--report` write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphquant.numerics import Dynamic

if TYPE_CHECKING:
    from graphquant.ir import TensorRef, Use
    from graphquant.numerics import Array, QParams
    from graphquant.pipeline import Result
    from graphquant.plans import Skip
    from graphquant.ranges import Ranges
    from graphquant.receipt import Receipt
    from graphquant.solve import Conflict
    from graphquant.survey import StoredTensor, Survey

SCHEMA = 1


def params_json(params: QParams | Dynamic | None) -> dict[str, Any]:
    """Scale, zero point and range; "dynamic" where they are computed at run time."""
    if params is None:
        return {"dynamic": True}
    if isinstance(params, Dynamic):
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
    """A tensor as JSON data."""
    return {"graph": tensor.graph, "op": tensor.op, "port": tensor.port}


def use_json(use: Use) -> dict[str, Any]:
    """A use as JSON data."""
    return {"graph": use.graph, "op": use.op, "slot": use.slot}


def skip_json(skip: Skip) -> dict[str, Any]:
    """A skip as JSON data."""
    uses = [use_json(use) for use in skip.uses]
    return {"tensor": tensor_json(skip.tensor), "uses": uses, "rule": skip.rule, "reason": skip.reason}


def ranges_json(ranges: Ranges) -> dict[str, Any]:
    """What a TFLite file's scales were used for."""
    return {
        "path": str(ranges.path) if ranges.path else None,
        "given": [{"tensor": tensor_json(one.tensor), "name": one.name, "exact": one.exact} for one in ranges.given],
        "unused": list(ranges.unused),
        "missing": [tensor_json(tensor) for tensor in ranges.missing],
    }


def receipt_json(receipt: Receipt) -> dict[str, Any]:
    """Each planned tensor beside what TFLite's runtime has."""

    def numbers(pair: tuple[Array, Array] | None) -> dict[str, Any] | None:
        return None if pair is None else {"scale": pair[0].astype(float).tolist(), "zero_point": pair[1].tolist()}

    return {
        "agrees": receipt.agrees,
        "tensors": [
            {
                "tensor": tensor_json(line.tensor),
                "name": line.name,
                "index": line.index,
                "planned": numbers(line.planned),
                "runtime": numbers(line.found),
                "problem": line.problem,
            }
            for line in receipt.lines
        ],
        "ops": receipt.ops,
        "float": [{"op": one.op, "type": one.type, "reason": one.reason} for one in receipt.floats],
    }


def result_json(result: Result, output: str | None, receipt: Receipt | None = None) -> dict[str, Any]:
    """The report of `insert`, with the receipt of a conversion to TFLite."""
    from graphquant.view.measured import check_json, fitted_json, search_json, timed_json

    return {
        "schema": SCHEMA,
        "input": str(result.source.path) if result.source.path else None,
        "output": output,
        "format": result.source.format,
        "model": result.plan.model,
        "rules": list(result.plan.rules),
        "steps": [
            {"step": step.step, "target": step.target, "detail": step.detail, "why": step.why}
            for step in result.plan.steps
        ],
        "data": _data(result),
        "sites": [
            {
                "tensor": tensor_json(done.site.tensor),
                "uses": [use_json(use) for use in done.site.uses],
                "output": tensor_json(done.output),
                "outputs": [tensor_json(output) for output in done.outputs],
                "rule": done.site.rule,
                "why": done.site.why,
                "folded": done.folded,
                "method": done.site.scheme.observe.name,
                "note": result.notes.get(done.site.tensor, ""),
                "choices": list(choices),
                **params_json(done.params),
            }
            for done, choices in zip(result.inserted, result.choices, strict=True)
        ],
        "corrections": [
            {"correction": one.correction, "target": one.target, "detail": one.detail, "done": one.done}
            for one in result.corrected
        ],
        "changes": [{"tensor": tensor_json(change.tensor), "says": change.says} for change in result.changes],
        "conflicts": [conflict_json(conflict) for conflict in result.conflicts],
        "losses": [
            {"tensor": tensor_json(loss.tensor), "sqnr": round(loss.sqnr, 2), "clipped": loss.clipped}
            for loss in result.losses
        ],
        "size_budget": fitted_json(result.fitted),
        "search": search_json(result.searched),
        "timing": timed_json(result.timed),
        "check": check_json(result.check),
        "skips": [skip_json(skip) for skip in result.skips],
        "unused": list(result.plan.unused),
        "ranges": None if result.ranges is None else ranges_json(result.ranges),
        "receipt": None if receipt is None else receipt_json(receipt),
    }


def conflict_json(conflict: Conflict) -> dict[str, Any]:
    """Two rules that could not both have what they want."""
    return {
        "rules": list(conflict.rules),
        "tensors": [tensor_json(tensor) for tensor in conflict.tensors],
        "wants": list(conflict.wants),
        "done": conflict.done,
    }


def _data(result: Result) -> dict[str, Any]:
    """What the ranges of activations come from."""
    stats = result.stats
    return {
        "samples": result.samples,
        "random": result.random,
        "blocks": stats.blocks if stats else 0,
        "complete": stats.complete if stats else True,
        "digests": [run.data for run in stats.runs] if stats else [],
        "stats": str(result.statistics) if result.statistics else None,
    }


def survey_json(found: Survey) -> dict[str, Any]:
    """What `inspect` found."""
    model = found.model
    return {
        "schema": SCHEMA,
        "path": str(model.path) if model.path else None,
        "format": model.format,
        "opset": model.opset or None,
        "digest": model.digest,
        "graphs": {name: len(graph) for name, graph in model.graphs.items() if name not in model.saved},
        "idle": list(found.idle),
        "copies": [{"graph": one.graph, "op": one.op, "kind": one.kind, "reason": one.reason} for one in found.copies],
        "inputs": [_signature(model.main.op(name)) for name in model.main.inputs],
        "outputs": list(model.main.outputs),
        "ops": found.kinds,
        "quantization": [
            {
                "graph": reading.graph,
                "op": reading.op,
                "type": reading.type,
                "tensor": tensor_json(reading.tensor),
                "consumers": reading.consumers,
                "rule": reading.rule,
                "round": reading.round,
                "learned": reading.learned,
                **params_json(reading.params),
            }
            for reading in found.readings
        ],
        "tensors": [stored_json(one) for one in found.tensors],
        "coverage": [
            {"graph": one.graph, "op": one.op, "kind": one.kind, "quantized": one.quantized, "reason": one.reason}
            for one in found.coverage
        ],
    }


def stored_json(one: StoredTensor) -> dict[str, Any]:
    """A tensor that keeps its scale itself, in the words of TFLite's interpreter."""
    stored = one.stored
    scales, zeros = stored.scale.astype(float).tolist(), stored.zero_point.tolist()
    signature = stored.sizes if one.output.shape is None else one.output.shape
    return {
        "graph": one.tensor.graph,
        "index": stored.index,
        "name": one.output.name,
        "kind": one.kind,
        "dtype": one.output.dtype,
        "shape": list(stored.sizes),
        "shape_signature": [-1 if size is None else size for size in signature],
        "quantization": [scales[0], zeros[0]] if len(scales) == len(zeros) == 1 else [0.0, 0],
        "quantization_parameters": {"scales": scales, "zero_points": zeros, "quantized_dimension": stored.axis},
        "min": stored.low.astype(float).tolist(),
        "max": stored.high.astype(float).tolist(),
        "details": stored.details,
    }


def _signature(op: Any) -> dict[str, Any]:
    output = op.outputs[0]
    return {"name": op.name, "dtype": output.dtype, "shape": None if output.shape is None else list(output.shape)}
