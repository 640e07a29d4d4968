"""The command line: parses, calls the pipeline, prints. What a command needs is imported when it runs."""

from __future__ import annotations

import sys
from io import TextIOWrapper

import click

from graphquant.cli.batching import batch
from graphquant.cli.calibrating import calibrate
from graphquant.cli.checking import check
from graphquant.cli.comparing import compare
from graphquant.cli.group import Group
from graphquant.cli.inserting import insert
from graphquant.cli.looking import data, explain, inspect, plan
from graphquant.cli.rule_files import rules
from graphquant.cli.undoing import diff, strip
from graphquant.kernels import repeatable


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="graphquant")
def main() -> None:
    """Quantize trained TensorFlow and ONNX graphs, and see exactly what was done.

    Results go to stdout, progress to stderr. Exit codes: 0 done, 1 findings, 2 usage or rule-file error, 3 model cannot
    be read, 4 a package is missing, 130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal's encoding may lack a name's letters
            stream.reconfigure(errors="backslashreplace")
    repeatable()  # before a data function imports TensorFlow


for command in (insert, calibrate, plan, explain, inspect, check, compare, diff, strip, batch, data, rules):
    main.add_command(command)
