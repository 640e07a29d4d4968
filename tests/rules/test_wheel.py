"""The rules and the other data files inside an installed wheel."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import graphquant
from graphquant.rules import shipped_rule_files

ROOT = Path(graphquant.__file__).parent.parent

CODE = """
import sys
import graphquant
from graphquant.rules import find_rule_file, load_ruleset, shipped_rule_files
paths = (graphquant.__file__, find_rule_file("onnxruntime"))
print(*paths, load_ruleset(["onnxruntime"]).digest, *shipped_rule_files(), sep="\\n")
"""


DATA = [
    "formats/tensorflow/opdefs.txt",
    "formats/tensorflow/schema.txt",
    "py.typed",
    "rules/patterns/detection.toml",
    "rules/patterns/transformers.toml",
    "visualize/viewer/data.js",
    "visualize/viewer/style.css",
]


@pytest.mark.slow
def test_rules_of_a_wheel(tmp_path):
    """A wheel carries the shipped rules and all data files, and its program finds rules by name."""
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert [name for name in DATA if not (site / "graphquant" / name).is_file()] == []
    environment = {**os.environ, "PYTHONPATH": str(site)}
    ran = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    package, rule_folder, digest, *names = ran.stdout.splitlines()
    assert package == str(site / "graphquant" / "__init__.py")
    assert rule_folder == str(site / "graphquant" / "rules" / "onnxruntime.toml")
    assert len(digest) == 64
    assert names == list(shipped_rule_files())
    listed = subprocess.run(
        [sys.executable, "-m", "graphquant", "rules", "list"],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["name", *shipped_rule_files()]
