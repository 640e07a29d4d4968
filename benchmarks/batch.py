"""Overhead of a batch over the work on its models, and the gain of a second worker and a second run.

Run: python benchmarks/batch.py [PAIRS]
Overhead and the second run are of onnx's small test models, each with its weights quantized. One worker and two run in
turns on copies of one model: of a larger one with its weights quantized, which is work for one core; and of a sample
model that is calibrated and compared, of which one worker does a part on both cores already. Every figure is of a batch
as `graphquant batch` runs it, from the time on when its workers are warm.
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import onnx

from graphquant.batch import workers
from graphquant.batch.manifest import load_entries
from graphquant.batch.run import BatchOptions, run_batch
from graphquant.batch.types import Entry, Outcome
from graphquant.batch.work import quantize_entry

OVERHEAD, SPEED_UP, AGAIN = 0.050, 1.7, 3.0
"""Most seconds for each model beside its own; least that two workers are worth; most seconds of a run without work."""

SAMPLES = Path(__file__).parent.parent / "sample_models"
DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"

COPIES = 16
"""Models for each run of one and two workers."""


class Run:
    """A run of a batch.

    Attributes:
        whole: Seconds that it took.
        each: Seconds between two outcomes, from when each worker has done one.
        own: Seconds that workers say one of these models took them.
        statuses: What became of the models.
    """

    def __init__(self, asked: Sequence[Entry], folder: Path, jobs: int, *, cache: bool = False) -> None:
        """Runs the batch in processes of its own, with all that it keeps in `folder`."""
        self._own: list[float] = []
        times: list[float] = []
        start = time.perf_counter()
        report = run_batch(
            asked,
            BatchOptions(folder=folder, cache=cache, force=True),
            partial(self._execute, jobs=jobs),
            on_outcome=lambda _outcome: times.append(time.perf_counter()),
        )
        self.whole = time.perf_counter() - start
        self.statuses = {one.status for one in report.outcomes}
        if len(self._own) > jobs:
            self.each = (times[-1] - times[jobs - 1]) / (len(times) - jobs)
            self.own = statistics.mean(self._own[jobs:])

    def _execute(self, todo: Sequence[Entry], jobs: int) -> Iterator[Outcome]:
        for outcome in workers.run_workers(
            todo, partial(quantize_entry, max_memory=1 << 30), workers.WorkerLimits(jobs=jobs)
        ):
            self._own.append(outcome.seconds)
            yield outcome


def small(folder: Path) -> list[Entry]:
    """Onnx's small test models, thrice each, in a folder."""
    folder.mkdir()
    for path in sorted(DATA.glob("*/*/model.onnx")):
        for number in range(3):
            shutil.copy(path, folder / f"{path.parent.parent.name}-{path.parent.name}-{number}.onnx")
    return load_entries([f"{folder}/*.onnx"], {"rules": ("weight_only",), "output": f"{folder}/out/{{name}}"})


def copies(model: Path, folder: Path, **given: object) -> list[Entry]:
    """Copies of a model, in a folder."""
    folder.mkdir()
    for number in range(COPIES):
        shutil.copy(model, folder / f"m{number:03}.onnx")
    return load_entries([f"{folder}/*.onnx"], {"output": f"{folder}/out/{{name}}", **given})


def speed_up(name: str, asked: Sequence[Entry], room: Path, pairs: int) -> float:
    """Models of two workers in the time of one worker's model: the median of pairs of runs."""
    ratios = []
    for _ in range(pairs):
        one, two = (Run(asked, room / "kept", jobs) for jobs in (1, 2))
        ratios.append(one.each / two.each)
        print(f"{name:12} one worker {one.each:6.3f} s a model, two {two.each:6.3f} s: {ratios[-1]:5.2f} times as many")
    return statistics.median(ratios)


def main() -> None:
    """Prints the figures; fails if one is out of its bound."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as made:
        room = Path(made)
        asked = small(room / "small")
        first = Run(asked, room / "kept", 1, cache=True)
        again = Run(asked, room / "kept", 1, cache=True)
        beside = first.each - first.own
        print(f"{len(asked)} small models: {first.each * 1000:.1f} ms each, {first.own * 1000:.1f} ms of it work;")
        print(
            f"overhead {beside * 1000:.1f} ms (at most {OVERHEAD * 1000:.0f}); {again.whole:.2f} s again ({AGAIN:.0f})"
        )
        plain = copies(DATA / "light" / "light_squeezenet.onnx", room / "plain", rules=("weight_only",))
        worth = speed_up("weights only", plain, room, pairs)
        calibration = str(SAMPLES / "digits_cnn_calib.npz")
        speed_up("calibrated", copies(SAMPLES / "digits_cnn.onnx", room / "calibrated", data=calibration), room, pairs)
        print(f"two workers on work for one core: {worth:.2f} times one (at least {SPEED_UP})")
    sys.exit(beside > OVERHEAD or again.whole > AGAIN or worth < SPEED_UP or "done" in again.statuses)


if __name__ == "__main__":
    main()
