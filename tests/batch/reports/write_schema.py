"""Write the JSON schema of reports. Run it after a change of graphquant/batch/types.py."""

import json
from pathlib import Path

from graphquant.batch.reports import report_schema

if __name__ == "__main__":
    folder = Path(__file__).parents[3] / "graphquant" / "batch" / "reports"
    folder.joinpath("report.schema.json").write_text(json.dumps(report_schema(), indent=2) + "\n", "utf-8")
