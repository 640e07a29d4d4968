"""Time of `graphquant --help` relative to `python -c "import click"`, in pairs, one after the other.

Run: python benchmarks/startup.py [PAIRS]
Measured on two cores, Python 3.11: see the printed medians; the help may take at most twice the time of the import.
"""

import statistics
import subprocess
import sys
import time

LIMIT = 2.0
"""Largest allowed ratio of the help's time to the import's."""

COMMANDS = {"import click": ["-c", "import click"], "graphquant --help": ["-m", "graphquant", "--help"]}


def measure(pairs: int) -> dict[str, float]:
    """The median wall time of each command in seconds, after one run of each that warms the caches."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(pairs + 1):
        for name, arguments in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def main() -> None:
    """Prints the medians; fails if the help takes more than its limit."""
    found = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
    for name, seconds in found.items():
        print(f"{name:20} {seconds * 1000:7.1f} ms")
    ratio = found["graphquant --help"] / found["import click"]
    print(f"{'ratio':20} {ratio:7.2f}     (at most {LIMIT})")
    sys.exit(ratio > LIMIT)


if __name__ == "__main__":
    main()
