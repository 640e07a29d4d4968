"""Write the JSON schema of reports. Run it after a change of graphquant/batch/types.py."""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).parents[2]
    sys.path.insert(0, str(tests))
    from support.json_schemas import report_schema

    folder = tests.parent / "graphquant" / "batch" / "reports"
    folder.joinpath("report.schema.json").write_text(json.dumps(report_schema(), indent=2) + "\n", "utf-8")
