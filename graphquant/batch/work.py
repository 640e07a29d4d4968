"""One model of a batch, from its path to its outcome; whatever goes wrong that a user can meet is the outcome."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphquant.batch.elsewhere import is_elsewhere, through
from graphquant.batch.gates import figures_of, misses
from graphquant.batch.ingredients import digest_of, file_digest, versions
from graphquant.batch.types import Digests, Found, Outcome, Problem
from graphquant.errors import GraphQuantError, InternalError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.batch.types import Entry, Status
    from graphquant.ir import Model
    from graphquant.pipeline import Progress

BACKEND = "onnxruntime"
"""Whose low-precision ops are counted where no gate names a backend."""


def work(entry: Entry, *, max_memory: int | None = None, progress: Progress | None = None) -> Outcome:
    """Quantizes a model, writes it, and holds it against its gates.

    What is at the output already is replaced: whether it may be was asked before.

    Args:
        entry: What is to be done.
        max_memory: Bytes that calibration may take; by default half of what is free.
        progress: Is told how far the work is.
    """
    start = time.monotonic()

    def made(one: Entry) -> Outcome:
        return _tried(one, lambda: _made(one, max_memory, progress))

    outcome = _tried(entry, lambda: through(entry, made)) if is_elsewhere(entry) else made(entry)
    return replace(outcome, seconds=round(time.monotonic() - start, 3))


def _tried(entry: Entry, make: Callable[[], Outcome]) -> Outcome:
    """The outcome that `make` gives, or that tells why it gives none."""
    try:
        return make()
    except GraphQuantError as error:
        return unmade(entry, type(error).__name__, str(error), error.exit_code)
    except OSError as error:
        return unmade(entry, type(error).__name__, _refused(error), UsageError.exit_code)
    except MemoryError:
        said = "There is not enough memory for this model. Give more with --max-memory, or fewer jobs with -j."
        return unmade(entry, "Memory", said, InternalError.exit_code, "memory")


def unmade(entry: Entry, kind: str, says: str, exit_code: int = 1, status: Status = "failed") -> Outcome:
    """The outcome of an entry that has no output."""
    return Outcome(
        name=entry.name,
        model=entry.model,
        output=entry.output,
        status=status,
        problem=Problem(kind=kind, says=says, exit_code=exit_code),
        versions=versions(),
    )


def judged(entry: Entry, outcome: Outcome, status: Status) -> Outcome:
    """An outcome whose output is there, held against the entry's gates."""
    missed = misses(entry.gates, outcome.figures, outcome.size_after or 0, outcome.findings)
    named = replace(outcome, name=entry.name, model=entry.model, output=entry.output)
    return replace(named, status="gate" if missed else status, misses=missed, problem=None)


def _refused(error: OSError) -> str:
    name = f"{error.filename} cannot be used" if error.filename else "A file cannot be used"
    return f"{name}: {error.strerror or error}. Give another path, or make room."


def _made(entry: Entry, max_memory: int | None, progress: Progress | None) -> Outcome:
    from graphquant import outputs, pipeline
    from graphquant.formats import format_of
    from graphquant.formats.parts import files_of
    from graphquant.whole import on_disk

    model, output = Path(entry.model), Path(entry.output)
    form = format_of(model)
    output.parent.mkdir(parents=True, exist_ok=True)
    outputs.check_model_output(output, model, form, force=True)
    result = pipeline.insert(
        pipeline.load(model),
        rules=entry.rules,
        data=entry.data,
        stats=entry.stats,
        method=entry.method,
        samples=entry.samples,
        max_memory=max_memory,
        include=entry.include,
        exclude=entry.exclude,
        family=entry.family,
        float_weights=entry.float_weights,
        min_sqnr=entry.gates.min_sqnr,
        min_agreement=None if entry.gates.min_agreement is None else entry.gates.min_agreement / 100,
        max_accuracy_drop=entry.gates.max_accuracy_drop,
        progress=progress,
    )
    result.save(output, force=True)
    before = sum(file.stat().st_size for file in files_of(model))
    files = files_of(output)
    on_disk(files)  # before the journal says that they are
    named = [(file.relative_to(output.parent).as_posix(), file_digest(file)) for file in files]
    written = pipeline.load(output)
    findings, low = _checked(written, entry.gates.check)
    return judged(
        entry,
        Outcome(
            name=entry.name,
            model=entry.model,
            output=entry.output,
            status="done",
            findings=findings,
            digests=Digests(rules=result.plan.digest, output=digest_of(named)),
            products=dict(named),
            size_before=before,
            size_after=sum(file.stat().st_size for file in files),
            sites=len(result.inserted),
            skips=dict(sorted(Counter(skip.reason for skip in result.skips).items())),
            low=low,
            figures=figures_of(result),
            versions=versions(),
        ),
        "done",
    )


def _checked(model: Model, backend: str | None) -> tuple[tuple[Found, ...], tuple[int, int] | None]:
    """What the check finds, where one is asked for, and how many ops run in low precision, of how many."""
    from graphquant.backends import CODES, check

    wanted = backend or (BACKEND if model.format == "onnx" else None)
    report = check(model, wanted)
    low = (report.counts["low"], len(report.verdicts)) if report.backend else None
    if backend is None:
        return (), low
    named = report if backend else check(model)
    findings = [
        Found(code=one.code, level=CODES[one.code].level, graph=one.graph, op=one.op, says=one.says, fix=one.fix)
        for one in named.findings
    ]
    return tuple(findings), low


__all__ = ["judged", "unmade", "work"]
