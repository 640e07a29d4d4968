"""The command line: it parses options, calls the API and prints results.

Commands import their dependencies when they run, so that `--help` is fast.
"""

from __future__ import annotations

import sys
from io import TextIOWrapper

import click

from graphquant.cli.batch import batch_command
from graphquant.cli.calibrate import calibrate_command
from graphquant.cli.compare import check_command, compare_command, diff_command
from graphquant.cli.insert import freeze_command, insert_command, strip_command
from graphquant.cli.inspect import data_group, explain_command, inspect_command, plan_command, rules_group
from graphquant.cli.mcp import mcp_command
from graphquant.cli.options import ErrorHandlingGroup
from graphquant.utils import disable_onednn


@click.group(cls=ErrorHandlingGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="graphquant")
def main() -> None:
    """Quantize trained TensorFlow and ONNX models, and report each change.

    Results go to stdout, progress and errors to stderr. Exit codes: 0 success, 1 findings or a missed bound, 2 usage or
    rule-file error, 3 unreadable model, 4 missing package, 130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        # A terminal's encoding may lack characters of a tensor name, which must not end the command.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # TensorFlow reads this setting when it is imported, and a data function may import it.
    disable_onednn()


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
    freeze_command,
    batch_command,
    data_group,
    rules_group,
    mcp_command,
):
    main.add_command(command)
