"""Batch reports without the values that differ between runs."""

from pathlib import Path

from graphquant.batch.types import TIME_KEYS, record_json


def report_without_times(report):
    """Return a report as JSON data that does not depend on workers or dates."""
    data = {key: value for key, value in record_json(report).items() if key not in TIME_KEYS}
    data["outcomes"] = [
        {key: value for key, value in outcome.items() if key not in TIME_KEYS} for outcome in data["outcomes"]
    ]
    data["changes"] = [change for change in data["changes"] if change["kind"] not in TIME_KEYS]
    return data


def read_outputs():
    """Return the content of each file in the folder `out`, by name."""
    return {path.name: path.read_bytes() for path in Path("out").iterdir()} if Path("out").is_dir() else {}
