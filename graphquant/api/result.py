"""The result of `insert`, and the provenance that it writes into the model."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant import __version__
from graphquant.analysis.range_report import Loss, activation_sqnr
from graphquant.analysis.validation import Validation, count_quantized_macs
from graphquant.api.models import save
from graphquant.calibration.targets import sites_needing_data
from graphquant.ir import QUANTIZATION_KINDS, Model, TensorRef
from graphquant.quantize import (
    Conflict,
    Plan,
    RangeTransfer,
    ScaleChange,
    Skip,
    Solution,
    explain_scale,
    export_ranges,
    format_step_counts,
    plan_to_json,
)
from graphquant.quantize.strip import BIASES_KEY, FACTORS_KEY, channel_factors, original_biases
from graphquant.utils import HtmlRepresentation, ShortDict
from graphquant.utils.options import checks_types

if TYPE_CHECKING:
    from graphquant.backends import Verdict
    from graphquant.calibration.data.check import DataFinding
    from graphquant.calibration.holdout import HoldOut
    from graphquant.calibration.stats import Stats
    from graphquant.optimize.algorithm import AlgorithmResult, PreCalibrationState, WeightEdits
    from graphquant.optimize.algorithms import BuiltModel
    from graphquant.optimize.latency import TimeRatio
    from graphquant.optimize.search import SearchTrace
    from graphquant.quantize.integer_io import BoundaryTensor
    from graphquant.quantize.rewrite import InsertedPair


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result(HtmlRepresentation):
    """Result of `insert`.

    Attributes:
        model: The quantized model.
        source: The float model.
        plan: The applied plan.
        inserted: The inserted Q/DQ pairs, one for each site.
        skips: Tensors that the plan or the solver skipped, with the reason.
        site_notes: Notes on sites, by tensor.
        saturated_tensors: Tensors whose ranges end where the ops that read them saturate.
        explain_scales: Function that returns `scale_reasons`, which few callers read.
        changes: Raised scales, copied weights and added pairs, with the reason.
        conflicts: Requirements of rules that contradict each other.
        stats: Statistics of the activations, or None if no data was needed.
        stats_path: The statistics file, or None if they were collected by this call.
        tflite_ranges: Use of a TFLite file's scales, or None without a file.
        algorithm_results: Changes by optimization algorithms, and ops that they skipped, with the reason.
        search: Result of the search, or None without bounds, a size budget or optimized latency.
        validation: Errors of the quantized model on the hold-out, or None without data.
        unjudged_reason: Reason why it is unknown whether the runtime accepts the model, or "".
        verdicts: How the installed ONNX Runtime runs each op; none in other formats, and if it cannot load the model.
        data_findings: Likely mistakes in the data.
        io: Integer inputs and outputs, and those that stay float with the reason; none without the option `io`.
        strict: True if a bound that is met but not proven is a failure.
        time_ratio: Time of a run relative to the float model on this machine, or None if it was not measured.
        holdout: Samples of the validation, on which a TFLite file is validated too, or None.
        serialized_emission: The message of a large ONNX model that was not edited since its validation, or None.
    """

    model: Model
    source: Model
    plan: Plan
    inserted: tuple[InsertedPair, ...]
    skips: tuple[Skip, ...]
    site_notes: Mapping[TensorRef, str] = field(default_factory=dict)
    saturated_tensors: frozenset[TensorRef] = frozenset()
    explain_scales: Callable[[], tuple[tuple[str, ...], ...]] = tuple
    changes: tuple[ScaleChange, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    stats: Stats | None = None
    stats_path: Path | None = None
    tflite_ranges: RangeTransfer | None = None
    algorithm_results: tuple[AlgorithmResult, ...] = ()
    validation: Validation | None = None
    unjudged_reason: str = ""
    verdicts: tuple[Verdict, ...] = ()
    search: SearchTrace | None = None
    data_findings: tuple[DataFinding, ...] = ()
    io: tuple[BoundaryTensor, ...] = ()
    strict: bool = False
    time_ratio: TimeRatio | None = None
    holdout: HoldOut | None = field(default=None, repr=False)
    serialized_emission: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Shorten the text of long collections."""
        HtmlRepresentation.__post_init__(self)
        object.__setattr__(self, "site_notes", ShortDict(self.site_notes))

    def _figure_texts(self) -> list[str]:
        """Return error, size, time and share in int8, as far as they are known."""
        figures = import_module("graphquant.visualize.text").result_figures(self)  # in a package above this one
        return [f"{label}: {value}" for label, value in figures]

    @property
    def scale_reasons(self) -> tuple[tuple[str, ...], ...]:
        """Explanations of the scale, for each of `inserted`."""
        return self.explain_scales()

    @property
    def calibration_samples(self) -> int:
        """Number of calibration samples."""
        return self.stats.samples if self.stats is not None else 0

    @property
    def has_random_data(self) -> bool:
        """True if any calibration samples were generated."""
        return self.stats is not None and self.stats.random

    @property
    def activation_sqnr(self) -> tuple[Loss, ...]:
        """Estimated SQNR of the quantized activations, lowest first, without those that are clipped on purpose."""
        return self.activations_below(math.inf)

    def activations_below(self, limit: float) -> tuple[Loss, ...]:
        """Return the part of `activation_sqnr` below `limit` dB."""
        pairs = (pair for pair in self.inserted if pair.site.tensor not in self.saturated_tensors)
        return activation_sqnr(pairs, self.stats.sketches if self.stats is not None else {}, limit)

    @property
    def is_changed(self) -> bool:
        """True if any tensor was quantized, also only the cache of a decoder."""
        return bool(self.inserted) or any(tensor.cache for tensor in self.io)

    @property
    def already_quantized(self) -> bool:
        """True if the model was quantized before, and stays unchanged."""
        return not (self.is_changed or self.source.op_kinds().isdisjoint(QUANTIZATION_KINDS | {"integer"}))

    @property
    def quantized_share(self) -> float | None:
        """Share of multiply-adds whose inputs are all quantized; None if the sizes of some are unknown without data."""
        if self.validation is not None and self.validation.total_macs:
            return self.validation.quantized_share
        quantized, total = count_quantized_macs(self.source, self.model)
        return quantized / total if total else None

    @property
    def failures(self) -> tuple[str, ...]:
        """Reasons for exit code 1: missed bounds, no measurement, and if `strict` those of `strict_failures`."""
        if self.strict:
            return self.strict_failures
        validation = self._measured
        if validation is None or not (validation.bounds or validation.comparison is None):
            return ()
        return validation.failures

    @property
    def strict_failures(self) -> tuple[str, ...]:
        """Bounds or default targets that are missed, or bounds that are met but not proven."""
        validation = self._measured
        caveats = () if self.search is None else self.search.caveats
        return () if validation is None else validation.failures or caveats

    @property
    def _measured(self) -> Validation | None:
        """The validation, or without a hold-out that of the search."""
        return self.validation or (None if self.search is None else self.search.search_validation)

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the quantized model and return its path; see `save`."""
        return save(self.model, path, force=force)

    @checks_types
    def export_ranges(self, path: str | Path) -> Path:
        """Write the ranges for another tool, which the suffix selects, and return the path.

        `.encodings` is for AIMET, `.cache` for TensorRT (symmetric ranges of activations), and `.json` has the tensor
        overrides of onnxruntime's quantizer.

        Raises:
            UsageError: The suffix is another one, or the file cannot be written.
        """
        destination = Path(path)
        export_ranges(destination, self.source, self.inserted)
        return destination


def make_result(
    source: Model,
    unscaled: Model,
    state: PreCalibrationState,
    built: BuiltModel,
    trace: SearchTrace | None,
    stats: Stats | None,
) -> Result:
    """Return the result with the quantized model, which is not validated yet, and record its provenance.

    `unscaled` is the prepared model before the algorithms of `state` changed it.
    """
    solution, solved_plan = built.edits.solution, built.edits.solution.plan
    prepared, solved = built.edits.model, sorted(built.params)
    result = Result(
        model=built.model,
        source=source,
        # The plan of the result applies to the prepared model, which has no rescaled channels.
        plan=state.plan_without_factors(state.plan if trace is None else trace.plan),
        inserted=tuple(built.insertions),
        skips=(*solved_plan.skips, *(built.skips[index] for index in sorted(built.skips))),
        site_notes=_notes_by_tensor(solution),
        saturated_tensors=frozenset(solved_plan.sites[index].tensor for index in solution.saturated),
        explain_scales=lambda: tuple(explain_scale(prepared, solved_plan, index, solution) for index in solved),
        changes=solution.changes,
        conflicts=solution.conflicts,
        stats=stats,
        algorithm_results=(*state.results, *built.edits.results),
        search=trace,
    )
    if not result.inserted:
        return replace(result, model=source)
    # Without folded weights, a record of the source includes the biases.
    is_folded = any(pair.folded for pair in built.insertions)
    model = replace(
        built.model,
        provenance=_provenance_of(result, built.edits if is_folded else None, unscaled, state),
        original_model=None if is_folded else source,
    )
    return replace(result, model=model)


def _notes_by_tensor(solution: Solution) -> dict[TensorRef, str]:
    """Return the notes of the solver by tensor, joined if several sites quantize it."""
    notes: dict[TensorRef, str] = {}
    for index, site_notes in sorted(solution.notes.items()):
        tensor = solution.plan.sites[index].tensor
        notes[tensor] = "; ".join(filter(None, (notes.get(tensor), *site_notes)))
    return notes


def _provenance_of(
    result: Result, edits: WeightEdits | None, unscaled: Model, state: PreCalibrationState
) -> dict[str, str]:
    """Return the origin that the written model records: no time, no paths and nothing about this machine."""
    plan, stats = result.plan, result.stats
    biases = [] if edits is None else original_biases(edits.prepared_model, edits.original_biases)
    rescaled_tensors = state.rescaled_tensors
    factors = channel_factors(unscaled, state.model) if rescaled_tensors and edits is not None else []
    # Names of rule files may be paths.
    plan_json = plan_to_json(replace(plan, rules=(), steps=()))
    plan_json["steps"] = [[step.step, step.target, step.detail] for step in plan.steps]
    methods = sorted({site.scheme.observe.name for site in sites_needing_data(plan)})
    record = {
        "version": __version__,
        "source": result.source.digest,
        "plan": hashlib.sha256(json.dumps(plan_json, sort_keys=True).encode()).hexdigest(),
        "rules": plan.digest,
        "method": ", ".join(methods) if stats is not None else "",
        "data": ", ".join(run.data_digest for run in stats.runs) if stats is not None else "",
        "steps": format_step_counts(step.step for step in plan.steps),
        "scaled": json.dumps(sorted(map(str, rescaled_tensors))) if rescaled_tensors else "",
        "algorithms": format_step_counts(change.algorithm for change in result.algorithm_results if change.applied),
        FACTORS_KEY: json.dumps(factors) if factors else "",
        BIASES_KEY: json.dumps(biases) if biases else "",
        "random": "yes" if stats is not None and stats.random else "",
    }
    return {key: value for key, value in record.items() if value}
