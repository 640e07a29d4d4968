"""Write the JSON Schema of the commands' results. Run it after a change of a JSON model."""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).parents[1]
    sys.path.insert(0, str(tests))
    from support.json_schemas import results_schema

    folder = tests.parent / "graphquant" / "visualize"
    folder.joinpath("results.schema.json").write_text(json.dumps(results_schema(), indent=2) + "\n", "utf-8")
