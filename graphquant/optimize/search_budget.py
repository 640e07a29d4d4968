"""Work of a search, predicted before it starts, and its limit relative to the calibration.

Work is predicted in nominal seconds from the sizes of the model, and never measured, so that the result of a search
does not depend on the machine. Only the ratio to the calibration's work matters. The constants were fitted to processor
times of ONNX Runtime (see docs/decisions).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from graphquant import formats
from graphquant.analysis.validation import measure_tensor_sizes
from graphquant.ir import count_macs
from graphquant.optimize.algorithms import activation_elements

if TYPE_CHECKING:
    from graphquant.calibration.data import Dataset
    from graphquant.ir import Model, OpKey
    from graphquant.quantize import Plan

RUN_SECONDS, OP_RUN_SECONDS = 3e-5, 5e-7  # of a run, and for each of its ops
MAC_SECONDS, ELEMENT_SECONDS = 2e-11, 5e-10  # of a run for each multiply-add and each element of an activation
OBSERVED_OP_SECONDS, OBSERVED_ELEMENT_SECONDS = 1.5e-5, 2.5e-9  # in addition where all activations are observed
CALIBRATION_SECONDS = 0.02  # of a calibration, whatever the model is
SESSION_SECONDS, SESSION_OP_SECONDS, SESSION_BYTE_SECONDS = 2e-3, 2e-4, 1e-9  # to create a session, by ops and weights
INSERT_SECONDS = 0.1  # of an `insert` without a search, whatever the model is
INSERT_SESSIONS = 9  # sessions that take as long as preparing, rewriting, validating and timing the model
BOUND_SESSIONS, BOUND_RUNS = 18, 5  # sessions, and runs of each sample, to measure a bound in addition
PLAN_SESSIONS = 2  # sessions that take as long as the solution, the rewrite and the session of a plan
BYPASS_SESSIONS = 1.25  # the same for a built plan with further sites in float
ALGORITHM_SESSIONS, ALGORITHM_RUNS = 4, 64  # sessions and runs that take as long as a cheap optimization algorithm
PLAN_RUNS = {"onnx": 1.25, "tensorflow": 2.5}
"""Runs of a sample that take as long as one with a plan that keeps some ops in float: TensorFlow computes pairs."""

SWITCHED_RUNS = {"onnx": 4.0, "tensorflow": 1.5}  # runs of a sample that take as long as one with switches
PLAN_BYTE_SECONDS, SWITCHED_BYTE_SECONDS = 2e-10, 4e-10  # of such runs for each byte of the weights, to dequantize them
START_SECONDS = 0.5  # start of the process, which is most of the time of a small model's calibration

MIN_LIMIT_SECONDS = 10.0  # minimum of a time limit that is a multiple of the calibration's time
TIME_MARGIN = 2.0  # measured time at which a search ends, relative to the limit of its predicted work

StopReason = Literal["work", "time", "interrupt", "error"]


class SearchLimitError(Exception):
    """The search has reached a limit. Its best plan so far is the result."""

    def __init__(self, reason: StopReason) -> None:
        """Create the exception with the limit."""
        super().__init__(reason)
        self.reason: StopReason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCosts:
    """Predicted work on a model, in nominal seconds."""

    run: float  # run of a sample
    observed_run: float  # run of a sample that observes all activations
    session: float  # creation of a session
    macs: Mapping[OpKey, int]  # multiply-adds of each op per sample
    format: str = "onnx"  # format of the model
    constant_bytes: int  # bytes of all constants

    def calibration(self, samples: int) -> float:
        """Return the work of a calibration on this number of samples."""
        return CALIBRATION_SECONDS + 2 * self.session + samples * self.observed_run

    @property
    def algorithm(self) -> float:
        """Work of a cheap optimization algorithm."""
        return ALGORITHM_SESSIONS * self.session + ALGORITHM_RUNS * self.run

    def plan(self, samples: int, algorithms: int = 0, folds: int = 1) -> float:
        """Return the work of building a plan, in as many models as there are folds, and of measuring it on samples."""
        return PLAN_SESSIONS * folds * self.session + samples * self._plan_run + algorithms * self.algorithm

    def bypassed_plan(self, samples: int, folds: int) -> float:
        """Return the work of measuring a built plan with further sites in float."""
        return BYPASS_SESSIONS * folds * self.session + samples * self._plan_run

    @property
    def _plan_run(self) -> float:
        return PLAN_RUNS[self.format] * self.run + PLAN_BYTE_SECONDS * self.constant_bytes

    def switched(self, samples: int, feeds: int, creates_session: bool) -> float:
        """Return the work of measuring one set of groups by switches, in `feeds` batches of samples.

        Switches take as long as the model itself, and quantize all weights in each run.
        """
        work = SWITCHED_RUNS[self.format] * samples * self.run + feeds * self.constant_bytes * SWITCHED_BYTE_SECONDS
        return work + (self.plan(0) if creates_session else 0.0)

    def insert(self, samples: int, algorithms: int, *, has_bounds: bool) -> float:
        """Return the work of an `insert` without a search."""
        fixed = INSERT_SECONDS + INSERT_SESSIONS * self.session + samples * self.run
        measured = BOUND_SESSIONS * self.session + BOUND_RUNS * samples * self.run if has_bounds else 0.0
        return fixed + measured + self.calibration(samples) + self.plan(0, algorithms)


def predict_costs(model: Model, plan: Plan, samples: Dataset, constant_bytes: int) -> SearchCosts:
    """Predict the work on a prepared model from its multiply-adds, activations, ops and weights.

    Sizes that shapes do not give are measured on a sample. Raises a ModelError if the model cannot be run.
    """
    runner = formats.create_runner(model)
    macs = count_macs(model, measure_tensor_sizes(model, samples, runner))
    elements = activation_elements(runner, plan, samples)
    ops = sum(op.kind not in {"input", "output", "constant"} for _, op in model.reachable_ops())
    run = RUN_SECONDS + OP_RUN_SECONDS * ops + MAC_SECONDS * sum(macs.values()) + ELEMENT_SECONDS * elements
    return SearchCosts(
        run=run,
        observed_run=run + OBSERVED_OP_SECONDS * ops + OBSERVED_ELEMENT_SECONDS * elements,
        session=SESSION_SECONDS + SESSION_OP_SECONDS * ops + SESSION_BYTE_SECONDS * constant_bytes,
        macs=macs,
        format=model.format,
        constant_bytes=constant_bytes,
    )


class SearchBudget:
    """Work and time that a search may use.

    A factor of the calibration's time limits the predicted work of the whole `insert`, which is counted before it
    starts, so that the result is the same on any machine. The measured time only protects from wrong predictions.
    Seconds limit only the time of the search.
    """

    def __init__(self, search_time: str, costs: SearchCosts, samples: int, elapsed: float, insert_work: float) -> None:
        """Start the clock. `search_time` is as in `InsertOptions`.

        The calibration used `samples` and took `elapsed` seconds of `search_clock`. Without a search, `insert` is
        predicted to take `insert_work` (see `SearchCosts.insert`).
        """
        amount, is_factor = float(search_time[:-1]), search_time.endswith("x")
        self.costs = costs
        self._clock = search_clock(search_time)
        seconds = max(TIME_MARGIN * amount * (START_SECONDS + elapsed), MIN_LIMIT_SECONDS) if is_factor else amount
        self._deadline = self._clock() + seconds
        self.limit = amount * (START_SECONDS + costs.calibration(samples)) if is_factor else math.inf
        self.work = START_SECONDS + insert_work  # nominal seconds

    @property
    def remaining(self) -> float:
        """Work that is left, in nominal seconds."""
        return max(self.limit - self.work, 0.0)

    def charge(self, work: float) -> None:
        """Count work that is about to start. Raises a SearchLimitError if there is no work or time left."""
        if self.work + work > self.limit:
            raise SearchLimitError("work")
        if self._clock() > self._deadline:
            raise SearchLimitError("time")
        self.work += work

    def extend(self, work: float) -> None:
        """Allow as much work, which builds the plan that a search ends with, whatever is left."""
        self.limit = max(self.limit, (self.work + work) * (1 + 1e-9))  # its parts may round to a larger sum
        self._deadline = math.inf


def search_clock(search_time: str) -> Callable[[], float]:
    """Return the clock of a limit: processor time for a factor, because the load of the machine must not decide."""
    return time.process_time if search_time.endswith("x") else time.monotonic
