"""Write the JSON Schema of the commands' results. Run it after a change of graphquant/visualize/json_export.py."""

import json
from pathlib import Path

from graphquant.visualize.json_export import results_schema

if __name__ == "__main__":
    folder = Path(__file__).parents[2] / "graphquant" / "visualize"
    folder.joinpath("results.schema.json").write_text(json.dumps(results_schema(), indent=2) + "\n", "utf-8")
