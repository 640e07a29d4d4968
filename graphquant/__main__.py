"""`python -m graphquant`."""

from __future__ import annotations

from graphquant.cli import main

if __name__ == "__main__":
    main()
