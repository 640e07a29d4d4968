"""Write the plan of each rule file for each model, as text: `python tests/rules/shipped/write_golden.py`."""

from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from golden_models import WRITERS
from rich.console import Console

import graphquant as gq
from graphquant.rules import shipped_rule_files
from graphquant.visualize.text import plan_view

HERE = Path(__file__).parent
SAMPLES = HERE.parents[2] / "sample_models"
SAMPLE_NAMES = ("digits_cnn.onnx", "digits_cnn.pb", "digits_rnn.onnx", "digits_rnn.pb", "digits_nested.onnx")
"""Convolutions; a While or Loop, an If and attention; a Loop, a Scan, an If and a function with convolutions."""

CASES = [(rules, model) for rules in shipped_rule_files() for model in (*SAMPLE_NAMES, *WRITERS)]


def golden_path(rules, model):
    """Return the file that holds the plan."""
    return HERE / "golden" / f"{model}.{rules}.txt"


def plan_text(rules, path):
    """Return the plan for the model at `path` as the command line prints it, at 120 columns."""
    file = StringIO()
    Console(file=file, width=120, color_system=None).print(plan_view(gq.plan(path, rules=[rules])))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def model_paths(folder):
    """Return the path of each model by its name. Those that are not sample models are written to `folder`."""
    written = {name: write(folder) for name, write in WRITERS.items()}
    return {name: SAMPLES / name for name in SAMPLE_NAMES} | written


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        paths = model_paths(Path(temporary))
        for rule_file, model_name in CASES:
            golden_path(rule_file, model_name).write_text(plan_text(rule_file, paths[model_name]), "utf-8")
