"""Entry point of `graphquant` and `python -m graphquant`."""

from __future__ import annotations

import gc  # Ctrl-C shows a traceback until `run` has started, so this module imports nothing large
import os
import sys

GC_THRESHOLDS = 1_000_000, 20, 20  # with Python's own ones, a tenth of the time for 10,000 ops


def run() -> None:
    """Run the command line. Ctrl-C also ends it with one line while modules are imported."""
    try:
        import signal

        # An import may lose a KeyboardInterrupt, or turn it into another error, so that it comes afterwards.
        can_block = hasattr(signal, "pthread_sigmask")  # not on Windows
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if can_block else None
        sys.unraisablehook = _repeat_interrupt
        gc.set_threshold(*GC_THRESHOLDS)
        _open_closed_streams()
        # pydantic would read the metadata of all installed packages in search of plugins.
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
        os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")  # idle threads spin for 2**20 clock cycles, not 2**26
        from graphquant.cli import main

        # The name is also that of python -m graphquant, because completion reads it. The group restores the signals.
        main(prog_name="graphquant", obj=previous)
    except Exception as error:
        if not _is_interrupt(error):
            raise
        _exit_interrupted()
    except KeyboardInterrupt:
        _exit_interrupted()
    finally:
        gc.freeze()  # else Python searches all objects for garbage as the process ends, which takes 0.2 s


def _repeat_interrupt(unraisable: sys.UnraisableHookArgs) -> None:
    """Send Ctrl-C again if Python loses it, as in a destructor or in the callback of a weak reference."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    import signal
    import threading

    # An exception that is raised before this function returns would be lost too.
    threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()


def _is_interrupt(error: BaseException | None) -> bool:
    """Return True if Ctrl-C caused an error: an import in a command may turn it into another one."""
    # pydantic quotes a KeyboardInterrupt in the text of its error, without a cause.
    return error is not None and ("KeyboardInterrupt" in f"{error!r}" or _is_interrupt(error.__cause__))


def _exit_interrupted() -> None:
    sys.stderr.write("Interrupted.\n")
    sys.exit(130)


def _open_closed_streams() -> None:
    """Open the null device for closed standard streams, because a file of the command would get their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it is the lowest free number
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115, PTH123


if __name__ == "__main__":
    run()
