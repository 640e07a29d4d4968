"""The pages under docs/ keep their word: their snippets run as they stand, in order."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from graphquant.batch.manifest import PLACEHOLDERS, ModelTable
from graphquant.calibration.data.images import PIXEL_PRESETS
from graphquant.calibration.data.spec import DATA_KINDS, PIXEL_KEYS
from graphquant.optimize import POST_CALIBRATION_ALGORITHMS, PRE_CALIBRATION_ALGORITHMS
from graphquant.qdq import FAMILIES, RangeSource
from graphquant.quantize import PREPARATION_STEPS
from graphquant.rules import table_keys as keys_of

ROOT = Path(__file__).parent.parent
PAGES = [
    "batch.md",
    "compare.md",
    "data.md",
    "diff.md",
    "families.md",
    "from-graph-editor.md",
    "live-objects.md",
    "preparation.md",
    "strip.md",
    "tensorflow.md",
]


def snippets(page):
    """Each code block of a page: what is behind its fence, and its text."""
    text = ROOT.joinpath("docs", page).read_text("utf-8")
    return re.findall(r"^```(\S[^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with the sample models, in which snippets run."""
    made = shutil.ignore_patterns("*.quant*")  # by README's commands
    shutil.copytree(ROOT / "sample_models", tmp_path / "sample_models", ignore=made)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_page(page):
    """Runs the snippets in order, Python in one namespace; gives what they printed, shell commands too."""
    names = {}
    printed = []
    for language, text in snippets(page):
        match language:
            case "python":
                code = (
                    f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n{indented(text)}"
                )
                exec(compile(code, page, "exec"), names)  # noqa: S102  # our own page
                printed.append(names["out"].getvalue())
            case "bash":
                printed.append(shell(text))
            case "python tf1":
                compile(text, page, "exec")  # what it calls is gone
            case _:
                pytest.fail(f"{page} has a block of {language!r}, which nothing runs")
    return "".join(printed)


def indented(text):
    """Python as the body of a block."""
    return "".join(f"    {line}" for line in text.splitlines(keepends=True))


def shell(text):
    """What bash prints for the commands, `graphquant` being this checkout's, `python` the one that runs the tests."""
    python = f'python() {{ "{sys.executable}" "$@"; }}'
    command = f'{python}\ngraphquant() {{ python -m graphquant "$@"; }}\n{text}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], capture_output=True, text=True, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_from_graph_editor(folder):
    """Each snippet runs, the files it names appear, and what the page says it prints is printed."""
    printed = run_page("from-graph-editor.md")
    page = ROOT.joinpath("docs", "from-graph-editor.md").read_text("utf-8")
    promised = re.findall(r"^It prints `([^`]+)`", page, re.MULTILINE)
    assert len(promised) == 2
    for line in promised:
        assert f"{line}\n" in printed
    assert "No op whose name contains 'residual_7' reads max_pool:0." in printed
    written = {path.name for path in folder.iterdir()}
    assert written >= {"recipe.pb", "recipe.onnx", "by_rules.pb", "by_line.pb", "by_line.onnx"}


def test_data(folder):
    """Each snippet runs, what the page says it prints is printed, and the description makes a model."""
    printed = run_page("data.md")
    page = ROOT.joinpath("docs", "data.md").read_text("utf-8")
    (promised,) = re.findall(r"^    input  dtype.*?findings\.$", page, re.MULTILINE | re.DOTALL)
    assert all(line.strip() in printed for line in promised.splitlines())
    assert printed.count("100 samples, no findings.") == 2
    assert printed.count("40 samples, no findings.") == 2
    assert folder.joinpath("digits.onnx").is_file()


def test_compare(folder):
    """Each snippet runs, and the page names every key of the JSON data."""
    printed = run_page("compare.md")
    assert "worst output" in printed
    page = ROOT.joinpath("docs", "compare.md").read_text("utf-8")
    data = json.loads(shell("graphquant compare quant.onnx quant.onnx --data random:2 --format json"))
    for key in {*data, *data["outputs"][0], *data["sites"][0]}:
        assert f"`{key}`" in page, key


@pytest.mark.slow
def test_batch(folder, monkeypatch):
    """Each snippet runs, what the page says it prints is printed, and the outputs that it names appear."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    printed = run_page("batch.md")
    page = ROOT.joinpath("docs", "batch.md").read_text("utf-8")
    (promised,) = re.findall(r"^It prints `([^`]+)`", page, re.MULTILINE)
    assert f"{promised}\n" in printed
    names = {path.relative_to(folder / "out").as_posix() for path in (folder / "out").rglob("*.onnx")}
    made = {f"digits_{name}.quant.onnx" for name in ("cnn", "cnn_bn", "rnn", "nested")}
    assert names == {*made, "trt/digits_cnn.onnx"}
    assert folder.joinpath("whole.html").is_file()


def test_batch_tables():
    """The page has a row for each key of a manifest, and for each part that may stand in braces."""
    page = ROOT.joinpath("docs", "batch.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\S+)` \| .* \|$", page, re.MULTILINE)
    assert sorted(rows) == sorted([*keys_of(ModelTable), *(f"{{{part}}}" for part in PLACEHOLDERS)])


@pytest.mark.parametrize("page", ["diff.md", "strip.md"])
def test_undoing(folder, page):
    """Each snippet runs, and what the page says it prints is printed."""
    printed = " ".join(run_page(page).split())
    text = ROOT.joinpath("docs", page).read_text("utf-8")
    (promised,) = re.findall(r"^It prints `([^`]+)`", text, re.MULTILINE)
    assert promised in printed


def test_preparation(folder):
    """The steps of a plan are printed as the page says, with and without the file that takes them out."""
    printed = run_page("preparation.md")
    page = " ".join(ROOT.joinpath("docs", "preparation.md").read_text("utf-8").split())
    folded, unfolded = printed.splitlines()
    assert folded in page
    assert unfolded == "[]"


def test_preparation_has_a_row_for_each_step():
    """The page's table names every step, in the order in which they are made, after the one that is made unasked."""
    rows = re.findall(
        r"^\| `([a-z-]+)` \| .*\|$", ROOT.joinpath("docs", "preparation.md").read_text("utf-8"), re.MULTILINE
    )
    assert rows[: 1 + len(PREPARATION_STEPS)] == ["opset", *PREPARATION_STEPS]


def test_corrections_have_a_row_each():
    """The page's table names every optimization algorithm, in the order in which they run."""
    page = ROOT.joinpath("docs", "algorithms.md").read_text("utf-8")
    assert re.findall(r"^\| `([a-z-]+)` \| .*\|$", page, re.MULTILINE) == [
        *PRE_CALIBRATION_ALGORITHMS,
        *POST_CALIBRATION_ALGORITHMS,
    ]


@pytest.mark.slow
def test_tensorflow(folder):
    """Each snippet runs, and what the page says it prints is printed."""
    pytest.importorskip("tensorflow")
    printed = run_page("tensorflow.md")
    page = ROOT.joinpath("docs", "tensorflow.md").read_text("utf-8")
    (promised,) = re.findall(r"^It prints (`.*?`)\.$", page, re.MULTILINE | re.DOTALL)
    for line in re.findall(r"`([^`]+)`", promised):
        assert f"{line}\n" in printed
    assert "[] ['it is not folded: its values are variables" in printed
    assert {path.name for path in folder.iterdir()} >= {"digits", "trained", "digits.pb"}


def test_data_tables():
    """The page has a row for each kind, key and preset, and presets set what it says."""
    page = ROOT.joinpath("docs", "data.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\S+)` \| (.*) \|$", page, re.MULTILINE))
    assert rows.keys() == {*DATA_KINDS, *PIXEL_KEYS, *PIXEL_PRESETS}
    for name, keys in PIXEL_PRESETS.items():
        said = ",".join(f"{key}={value}" for key, value in keys.items())
        assert rows[name].endswith(f"| `{said}`" if said else "| none")


@pytest.mark.slow
def test_live_objects(folder):
    """Each snippet runs, what the page says it prints is printed, and the files it names appear."""
    pytest.importorskip("tensorflow")
    printed = run_page("live-objects.md")
    page = ROOT.joinpath("docs", "live-objects.md").read_text("utf-8")
    promised = re.findall(r"^It prints `([^`]+)`", page, re.MULTILINE)
    assert len(promised) == 4
    for line in promised:
        assert f"{line}\n" in printed
    assert {path.name for path in folder.iterdir()} >= {"model.tflite", "model.keras", "model.quant"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_families(folder):
    """Each snippet runs, and what the page says it prints is printed."""
    pytest.importorskip("tensorflow")
    printed = run_page("families.md")
    page = ROOT.joinpath("docs", "families.md").read_text("utf-8")
    (promised,) = re.findall(r"^It prints `([^`]+)`", page, re.MULTILINE)
    assert f"{promised}\n" in printed
    assert {path.name for path in folder.iterdir()} >= {"learned", "learned_later", "learned.pb"}


def test_families_tables():
    """The page has a column or row for each family of TensorFlow and each source of ranges."""
    page = ROOT.joinpath("docs", "families.md").read_text("utf-8")
    named = [name for name, family in FAMILIES.items() if family.format == "tensorflow"]
    (head,) = re.findall(r"^\| \| (.*) \|$", page, re.MULTILINE)
    assert [word.strip("`") for word in head.split(" | ")] == [
        name.removeprefix("quantize-and-dequantize") for name in named
    ]
    assert re.findall(r'^\| `"(\w+)"` \|', page, re.MULTILINE) == list(get_args(RangeSource))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """Links to files name files that exist."""
    text = ROOT.joinpath("docs", page).read_text("utf-8")
    targets = re.findall(r'(?:\]\(|src=")([^)"#]+)', text)
    assert [one for one in targets if "://" not in one and not ROOT.joinpath("docs", one).exists()] == []
