"""The command line: parses, calls the pipeline, prints. What a command needs is imported when it runs."""

from __future__ import annotations

import sys
from io import TextIOWrapper

import click

from graphquant.cli.batch import batch_command
from graphquant.cli.calibrate import calibrate_command
from graphquant.cli.check import check_command
from graphquant.cli.compare import compare_command
from graphquant.cli.insert import insert_command
from graphquant.cli.inspect import data_group, explain_command, inspect_command, plan_command
from graphquant.cli.options import ErrorHandlingGroup
from graphquant.cli.rules import rules_group
from graphquant.cli.strip import diff_command, strip_command
from graphquant.utils.tf_determinism import disable_onednn


@click.group(cls=ErrorHandlingGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="graphquant")
def main() -> None:
    """Quantize trained TensorFlow and ONNX graphs, and see exactly what was done.

    Results go to stdout, progress to stderr. Exit codes: 0 done, 1 findings, 2 usage or rule-file error, 3 model cannot
    be read, 4 a package is missing, 130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal's encoding may lack a name's letters
            stream.reconfigure(errors="backslashreplace")
    disable_onednn()  # before a data function imports TensorFlow


for command in (
    insert_command,
    calibrate_command,
    plan_command,
    explain_command,
    inspect_command,
    check_command,
    compare_command,
    diff_command,
    strip_command,
    batch_command,
    data_group,
    rules_group,
):
    main.add_command(command)
