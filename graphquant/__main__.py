"""Entry point of `graphquant` and `python -m graphquant`."""

from __future__ import annotations

import _thread  # Ctrl-C shows a traceback until `run` has its handler, so this module imports nothing large
import gc
import os
import sys
import time

TYPE_CHECKING = False  # as in graphquant/__init__.py
if TYPE_CHECKING:
    from types import FrameType

GC_THRESHOLDS = 1_000_000, 20, 20  # with Python's own ones, a tenth of the time for 10,000 ops
IMPORT_SECONDS, POLL_SECONDS = 2.0, 0.01  # for which Ctrl-C waits until an import ends, and between two looks


def run() -> None:
    """Run the command line. Ctrl-C also ends it with one line while modules are imported."""
    try:
        _delay_interrupts_of_imports()
        gc.set_threshold(*GC_THRESHOLDS)
        _open_closed_streams()
        # pydantic would read the metadata of all installed packages in search of plugins.
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
        os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")  # idle threads spin for 2**20 clock cycles, not 2**26
        from graphquant.cli import main

        main(prog_name="graphquant")  # also of python -m graphquant, because completion reads it
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        sys.exit(130)
    finally:
        gc.freeze()  # else Python searches all objects for garbage as the process ends, which takes 0.2 s


def _delay_interrupts_of_imports() -> None:
    """Let Ctrl-C during an import raise KeyboardInterrupt after it, as an import may lose it or raise another error."""
    from signal import SIGINT, default_int_handler, getsignal, signal

    deadline = 0.0

    def interrupt_later() -> None:
        time.sleep(POLL_SECONDS)
        _thread.interrupt_main()

    def handle(_number: int, frame: FrameType | None) -> None:
        nonlocal deadline
        deadline = deadline or time.monotonic() + IMPORT_SECONDS
        while frame and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
            frame = frame.f_back
        if frame is None or time.monotonic() > deadline:
            deadline = 0.0
            raise KeyboardInterrupt
        _thread.start_new_thread(interrupt_later, ())

    if getsignal(SIGINT) is default_int_handler:  # a parent process may have it ignored
        signal(SIGINT, handle)


def _open_closed_streams() -> None:
    """Open the null device for closed standard streams, because a file of the command would get their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it is the lowest free number
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115, PTH123


if __name__ == "__main__":
    run()
