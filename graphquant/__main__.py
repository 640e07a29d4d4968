"""Entry point of `graphquant` and `python -m graphquant`."""

from __future__ import annotations

import sys


def run() -> None:
    """Run the command line. Ctrl-C also ends it with one line while modules are imported."""
    try:
        from graphquant.cli import main

        main()
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        sys.exit(130)


if __name__ == "__main__":
    run()
