"""Writes what each rule file plans for the sample models, as text: `python tests/rules/write_golden.py`."""

from io import StringIO
from pathlib import Path

from rich.console import Console

import graphquant as gq
from graphquant.rules import shipped_rule_files
from graphquant.visualize.text import plan_view

HERE = Path(__file__).parent
MODELS = HERE.parents[2] / "sample_models"
CASES = [(rules, model) for rules in shipped_rule_files() for model in ("digits_cnn.onnx", "digits_cnn.pb")]


def golden(rules, model):
    """The file that holds the plan."""
    return HERE / f"{model}.{rules}.txt"


def planned(rules, model):
    """The plan as the command line prints it, at 120 columns."""
    file = StringIO()
    Console(file=file, width=120, color_system=None).print(plan_view(gq.plan(MODELS / model, rules=[rules])))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


if __name__ == "__main__":
    for case in CASES:
        golden(*case).write_text(planned(*case), "utf-8")
