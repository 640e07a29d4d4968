"""Code blocks of the pages under docs/ run in order, and tables and links are up to date."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import get_args

import pytest
from support.cli import run_cli
from support.documents import language_blocks

import graphquant as gq
from graphquant.backends.lint import LINT_CODES
from graphquant.batch.manifest import PLACEHOLDERS, ModelTable
from graphquant.batch.reports.text import BATCH_CODES
from graphquant.calibration.data.dataset import DATA_KINDS, PIXEL_KEYS
from graphquant.calibration.data.images import PIXEL_PRESETS
from graphquant.cli import main
from graphquant.errors import GraphQuantError
from graphquant.optimize.algorithms import POST_CALIBRATION_ALGORITHMS, PRE_CALIBRATION_ALGORITHMS
from graphquant.qdq import FAMILIES
from graphquant.quantize.fold_batchnorm import VARIABLES_NOT_FOLDED
from graphquant.quantize.prepare import PREPARATION_STEPS
from graphquant.rules import rule_file_schema, shipped_rule_files
from graphquant.rules.toml_document import table_keys as keys_of
from graphquant.utils.option_types import RangeSource

ROOT = Path(__file__).parent.parent
PAGES = [
    "agents.md",
    "batch.md",
    "compare.md",
    "data.md",
    "diff.md",
    "families.md",
    "from-graph-editor.md",
    "live-objects.md",
    "preparation.md",
    "ranges.md",
    "strip.md",
    "tensorflow.md",
    "ci.md",
    "commands.md",
    "exit-codes.md",
    "questions.md",
    "targets.md",
]


def page_blocks(page):
    """Return language and text of each code block of a page."""
    return language_blocks(ROOT.joinpath("docs", page).read_text("utf-8"))


@pytest.fixture
def docs_folder(tmp_path, monkeypatch):
    """Return an empty folder with the sample models, and make it the current one."""
    ignore_outputs = shutil.ignore_patterns("*.quant*")  # outputs of README's commands
    shutil.copytree(ROOT / "sample_models", tmp_path / "sample_models", ignore=ignore_outputs)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_page(page):
    """Run a page's code blocks in order, Python in one namespace. Return what they printed."""
    names = {}
    printed = []
    for language, text in page_blocks(page):
        match language:
            case "python":
                code = f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n{indent(text)}"
                exec(compile(code, page, "exec"), names)  # noqa: S102  # our own page
                printed.append(names["out"].getvalue())
            case "bash":
                printed.append(run_shell(text))
            case "python tf1":
                compile(text, page, "exec")  # TensorFlow 2 cannot run it
            case _:
                pytest.fail(f"{page} has a block of {language!r}, which this test cannot run")
    return "".join(printed)


def indent(text):
    """Return Python code as the body of a block."""
    return "".join(f"    {line}" for line in text.splitlines(keepends=True))


NEEDS_SHELL = re.compile(r"[|&;<>$`(){}*?~#=]|^(?!graphquant )", re.MULTILINE)
"""Finds a line that is no plain command of graphquant."""


def run_shell(text):
    """Return the output of shell commands. graphquant is this checkout's, python is the one of the tests.

    Plain commands of graphquant run in this process, which has imported TensorFlow already.
    """
    lines = text.replace("\\\n", " ").strip()
    if NEEDS_SHELL.search(lines) is None:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            return "".join(run_cli(*shlex.split(line)[1:]).stdout for line in lines.splitlines())
    python = f'python() {{ "{sys.executable}" "$@"; }}'
    command = f'{python}\ngraphquant() {{ python -m graphquant "$@"; }}\n{text}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], capture_output=True, text=True, check=False, env=environment
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.slow
def test_from_graph_editor(docs_folder):
    """The page's code blocks run, print the documented output, and create the files."""
    printed = run_page("from-graph-editor.md")
    page = ROOT.joinpath("docs", "from-graph-editor.md").read_text("utf-8")
    expected = re.findall(r"^It prints `([^`]+)`", page, re.MULTILINE)
    assert len(expected) == 2
    for line in expected:
        assert f"{line}\n" in printed
    assert "'residual_7' reads max_pool:0." in printed
    names = {path.name for path in docs_folder.iterdir()}
    assert names >= {"recipe.pb", "recipe.onnx", "by_rules.pb", "by_line.pb", "by_line.onnx"}


@pytest.mark.slow
def test_data(docs_folder):
    """The page's code blocks run, print the documented output, and the data description is valid."""
    printed = run_page("data.md")
    page = ROOT.joinpath("docs", "data.md").read_text("utf-8")
    (expected,) = re.findall(r"^    input  dtype.*?findings\.$", page, re.MULTILINE | re.DOTALL)
    assert all(line.strip() in printed for line in expected.splitlines())
    assert printed.count("100 samples, no findings.") == 2
    assert printed.count("40 samples, no findings.") == 2
    assert docs_folder.joinpath("digits.onnx").is_file()


@pytest.mark.slow
def test_compare(docs_folder):
    """The page's code blocks run, and the page names every key of the JSON."""
    printed = run_page("compare.md")
    assert "worst output" in printed
    page = ROOT.joinpath("docs", "compare.md").read_text("utf-8")
    data = json.loads(run_shell("graphquant compare quant.onnx quant.onnx --data random:2 --format json"))
    for key in {*data, *data["outputs"][0], *data["sites"][0]}:
        assert f"`{key}`" in page, key


@pytest.mark.slow
def test_batch(docs_folder, monkeypatch):
    """The page's code blocks run, print the documented output, and create the outputs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(docs_folder / "cache"))
    printed = run_page("batch.md")
    page = ROOT.joinpath("docs", "batch.md").read_text("utf-8")
    (expected,) = re.findall(r"^It prints `([^`]+)`", page, re.MULTILINE)
    assert f"{expected}\n" in printed
    names = {path.relative_to(docs_folder / "out").as_posix() for path in (docs_folder / "out").rglob("*.onnx")}
    outputs = {f"digits_{name}.quant.onnx" for name in ("cnn", "cnn_bn", "rnn", "nested", "resnet")}
    assert names == {*outputs, "trt/digits_cnn.onnx"}
    assert docs_folder.joinpath("whole.html").is_file()


def test_batch_tables():
    """The page has a row for each key of a manifest and each placeholder."""
    page = ROOT.joinpath("docs", "batch.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\S+)` \| .* \|$", page, re.MULTILINE)
    assert sorted(rows) == sorted([*keys_of(ModelTable), *(f"{{{part}}}" for part in PLACEHOLDERS)])


@pytest.mark.slow
@pytest.mark.parametrize("page", ["diff.md", "strip.md"])
def test_undoing(docs_folder, page):
    """The page's code blocks run and print the documented output."""
    printed = " ".join(run_page(page).split())
    text = ROOT.joinpath("docs", page).read_text("utf-8")
    (expected,) = re.findall(r"^It prints `([^`]+)`", text, re.MULTILINE)
    assert expected in printed


@pytest.mark.slow
def test_preparation(docs_folder):
    """The page's code blocks print the documented steps, and none with the file that disables them."""
    printed = run_page("preparation.md")
    page = " ".join(ROOT.joinpath("docs", "preparation.md").read_text("utf-8").split())
    folded, unfolded = printed.splitlines()
    assert folded in page
    assert unfolded == "[]"


def test_preparation_has_a_row_for_each_step():
    """The page's table lists every step in order, after the opset conversion."""
    rows = re.findall(
        r"^\| `([a-z-]+)` \| .*\|$", ROOT.joinpath("docs", "preparation.md").read_text("utf-8"), re.MULTILINE
    )
    assert rows[: 1 + len(PREPARATION_STEPS)] == ["opset", *PREPARATION_STEPS]


def test_algorithms_have_a_row_each():
    """The page's table lists every optimization algorithm in the order in which they run."""
    page = ROOT.joinpath("docs", "algorithms.md").read_text("utf-8")
    assert re.findall(r"^\| `([a-z-]+)` \| .*\|$", page, re.MULTILINE) == [
        *PRE_CALIBRATION_ALGORITHMS,
        *POST_CALIBRATION_ALGORITHMS,
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated:UserWarning")
def test_tensorflow(docs_folder):
    """The page's code blocks run, print the documented output, and create the files."""
    pytest.importorskip("tensorflow")
    printed = run_page("tensorflow.md")
    page = ROOT.joinpath("docs", "tensorflow.md").read_text("utf-8")
    (expected,) = re.findall(r"^It prints (`.*?`)\.$", page, re.MULTILINE | re.DOTALL)
    for line in re.findall(r"`([^`]+)`", expected):
        assert f"{line}\n" in printed
    assert f"[] ['{VARIABLES_NOT_FOLDED}" in printed
    assert {path.name for path in docs_folder.iterdir()} >= {"digits", "trained", "digits.pb"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accelerator", "ci", "onnx", "tflite"])
def test_tutorials(docs_folder, name):
    """The code blocks of each tutorial run, and print the documented output."""
    printed = run_page(f"tutorials/{name}.md")
    text = ROOT.joinpath("docs", "tutorials", f"{name}.md").read_text("utf-8")
    assert all(f"{line}\n" in printed for line in re.findall(r"^It prints `([^`]+)`", text, re.MULTILINE))


GUIDES = [
    path.relative_to(ROOT / "docs").as_posix()
    for folder in ("howto", "explanation")
    for path in sorted(ROOT.joinpath("docs", folder).glob("*.md"))
]


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES)
def test_guides(docs_folder, page):
    """The code blocks of each how-to and explanation run, and print the documented output."""
    printed = run_page(page)
    text = ROOT.joinpath("docs", page).read_text("utf-8")
    assert all(f"{line}\n" in printed for line in re.findall(r"^It prints `([^`]+)`", text, re.MULTILINE))


@pytest.mark.parametrize("page", GUIDES)
def test_links_of_guides(page):
    """The links of each how-to and explanation lead to files."""
    text = ROOT.joinpath("docs", page).read_text("utf-8")
    targets = re.findall(r"\]\(([^)#]+)", text)
    folder = ROOT.joinpath("docs", page).parent
    assert [target for target in targets if "://" not in target and not folder.joinpath(target).exists()] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated:UserWarning")
def test_ranges(docs_folder):
    """The commands of the page run, and write the files."""
    run_page("ranges.md")
    assert {path.name for path in docs_folder.iterdir()} >= {"digits.encodings", "again.onnx", "moved.onnx"}


@pytest.mark.slow
def test_agents(docs_folder):
    """The commands of the skill and of the page run, and the page prints the documented output."""
    printed = run_page("agents.md")
    page = ROOT.joinpath("docs", "agents.md").read_text("utf-8")
    (expected,) = re.findall(r"^It prints `([^`]+)`", page, re.MULTILINE)
    assert f"{expected}\n" in printed
    skill = ROOT.joinpath("SKILL.md").read_text("utf-8")
    blocks = re.findall(r"^   ```bash\n(.*?)^   ```$", skill, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    run_shell("".join(blocks))


def test_targets_have_a_row_each():
    """The table of targets has a row for each shipped rule file."""
    page = ROOT.joinpath("docs", "targets.md").read_text("utf-8")
    assert sorted(re.findall(r"^\| `(\w+)`", page, re.MULTILINE)) == sorted(shipped_rule_files())


def test_exit_codes_have_a_row_each():
    """The table of exit codes has the code of every error class."""
    page = ROOT.joinpath("docs", "exit-codes.md").read_text("utf-8")
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert listed == {kind.exit_code for kind in GraphQuantError.__subclasses__()} | {0, 130}


def test_generated_reference():
    """The pages that are generated name each command, each public name and each key of rule files."""
    hooks = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))
    pages = {path: create_page() for path, create_page in hooks["PAGES"].items()}
    assert set(main.commands) <= set(re.findall(r"^## graphquant (\w+)", pages["reference/cli.md"], re.MULTILINE))
    public = set(gq.__all__) - {"__version__", "graph_editor"}
    assert set(re.findall(r"^## gq\.(\w+)", pages["reference/python.md"], re.MULTILINE)) == public
    codes = re.findall(r"^\| `(GQ\d+)`", pages["reference/findings.md"], re.MULTILINE)
    assert codes == [*LINT_CODES, *BATCH_CODES]
    assert set(keys_of(ModelTable)) <= set(re.findall(r"^\| `(\w+)`", pages["reference/manifest.md"], re.MULTILINE))
    results = json.loads((ROOT / "graphquant" / "visualize" / "results.schema.json").read_text("utf-8"))["$defs"]
    assert set(re.findall(r"^## (\w+)$", pages["reference/json.md"], re.MULTILINE)) >= {
        name for name, table in results.items() if "properties" in table
    }
    keys = {key for table in rule_file_schema()["$defs"].values() for key in table["properties"]}
    assert keys <= set(re.findall(r"^\| `(\w+)`", pages["reference/rules.md"], re.MULTILINE))


def test_navigation_has_each_page():
    """The navigation of the site has each page under docs/ once; those that are generated have a short form there."""
    text = ROOT.joinpath("mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"- ([\w/.-]+\.md)$", text, re.MULTILINE)
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in ROOT.joinpath("docs").rglob("*.md")]
    assert sorted(listed) == sorted(pages)


def test_data_tables():
    """The page has a row for each data kind, pixel key and preset, with the keys that a preset sets."""
    page = ROOT.joinpath("docs", "data.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\S+)` \| (.*) \|$", page, re.MULTILINE))
    assert rows.keys() == {*DATA_KINDS, *PIXEL_KEYS, *PIXEL_PRESETS}
    for name, keys in PIXEL_PRESETS.items():
        settings = ",".join(f"{key}={value}" for key, value in keys.items())
        assert rows[name].endswith(f"| `{settings}`" if settings else "| none")


@pytest.mark.slow
def test_live_objects(docs_folder):
    """The page's code blocks run, print the documented output, and create the files."""
    pytest.importorskip("tensorflow")
    printed = run_page("live-objects.md")
    page = ROOT.joinpath("docs", "live-objects.md").read_text("utf-8")
    expected = re.findall(r"^It prints `([^`]+)`", page, re.MULTILINE)
    assert len(expected) == 4
    for line in expected:
        assert f"{line}\n" in printed
    assert {path.name for path in docs_folder.iterdir()} >= {"model.tflite", "model.keras", "model.quant"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_families(docs_folder):
    """The page's code blocks run, print the documented output, and create the files."""
    pytest.importorskip("tensorflow")
    printed = run_page("families.md")
    page = ROOT.joinpath("docs", "families.md").read_text("utf-8")
    (expected,) = re.findall(r"^It prints `([^`]+)`", page, re.MULTILINE)
    assert f"{expected}\n" in printed
    assert {path.name for path in docs_folder.iterdir()} >= {"learned", "learned_later", "learned.pb"}


def test_families_tables():
    """The page has a column for each TensorFlow family and a row for each source of ranges."""
    page = ROOT.joinpath("docs", "families.md").read_text("utf-8")
    names = [name for name, family in FAMILIES.items() if family.format == "tensorflow"]
    (head,) = re.findall(r"^\| \| (.*) \|$", page, re.MULTILINE)
    assert [word.strip("`") for word in head.split(" | ")] == [
        name.removeprefix("quantize-and-dequantize") for name in names
    ]
    assert re.findall(r'^\| `"(\w+)"` \|', page, re.MULTILINE) == list(get_args(RangeSource))


def test_links_are_valid():
    """Relative links of each page name files that a checkout has, also those that the site generates."""
    for page in [ROOT / "README.md", *ROOT.joinpath("docs").rglob("*.md")]:
        targets = re.findall(r'(?:\]\(|src=")([^)"#]+)', page.read_text("utf-8"))
        missing = [target for target in targets if "://" not in target and not page.parent.joinpath(target).exists()]
        assert missing == [], page
