"""JSON schemas that others publish for files that graphquant writes or ships."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema

SARIF = Path(__file__).with_name("sarif-2.1.0.json")
"""Schema of the OASIS standard SARIF 2.1.0, as SchemaStore (Apache-2.0) publishes it, unchanged."""


def validate_sarif(log: Any) -> None:
    """Validate a SARIF log. Raises a ValidationError."""
    schema = json.loads(SARIF.read_text("utf-8"))
    jsonschema.validate(log, schema, format_checker=jsonschema.FormatChecker())


def run_validator(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command line of a package, such as check-jsonschema, which ships the schemas of CI services."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
