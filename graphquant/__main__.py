"""`python -m graphquant`."""

from graphquant.cli import main

if __name__ == "__main__":
    main()
