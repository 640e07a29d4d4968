"""README.md: Python examples run, and outputs, tables and links are up to date."""

import json
import re
from pathlib import Path

from support.documents import code_blocks

from graphquant.rules import load_ruleset, shipped_rule_files

ROOT = Path(__file__).parent.parent
TEXT = ROOT.joinpath("README.md").read_text("utf-8")


def test_python_runs(tmp_path, monkeypatch, capsys):
    """The Python example runs, and prints what README shows."""
    tmp_path.joinpath("sample_models").symlink_to(ROOT / "sample_models")
    monkeypatch.chdir(tmp_path)
    (code,) = code_blocks(TEXT, "python")
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102  # README's own code
    (printed,) = re.findall(r"^It prints `([^`]+)`", TEXT, re.MULTILINE)
    assert capsys.readouterr().out == f"{printed}\n"
    assert tmp_path.joinpath("digits_resnet.quant.onnx").is_file()


def test_readme_is_short():
    """README has at most 130 lines."""
    assert TEXT.count("\n") <= 130


def test_rule_file_has_eight_lines(tmp_path):
    """README's rule file has eight lines and is valid."""
    (text,) = re.findall(r"<<'END'\n(.*?)^END$", TEXT, re.DOTALL | re.MULTILINE)
    assert len(text.splitlines()) == 8
    file = tmp_path / "mine.toml"
    file.write_text(text, "utf-8")
    assert [rule.rule.name for rule in load_ruleset([str(file)]).rules] == ["block-input"]


def test_targets_are_the_shipped_rules():
    """The section on targets names each shipped rule file."""
    section = TEXT.partition("## Targets")[2].partition("## ")[0]
    assert sorted(re.findall(r"`(\w+)`", section)) == sorted(shipped_rule_files())


def test_two_set_up_commands():
    """There are exactly two set-up commands, of one line each, before the heading "Commands"."""
    before = TEXT.partition("\n## Commands\n")[0]
    commands = re.findall(r"^```bash\n(.*?)^```$", before, re.DOTALL | re.MULTILINE)
    assert [block.count("\n") for block in commands] == [1, 1]


def test_links_are_valid():
    """Pictures and relative links name existing files."""
    targets = re.findall(r'(?:\]\(|src=|srcset=)"?([^)"#]+)', TEXT)
    assert [target for target in targets if "://" not in target and not ROOT.joinpath(target).exists()] == []


def test_measured_figures():
    """The figures beside other quantizers are those of the committed report, which names the versions."""
    report = json.loads(ROOT.joinpath("benchmarks/report.json").read_text("utf-8"))
    section = TEXT.partition("\n## Beside other quantizers\n")[2].partition("\n## ")[0]
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "|" in line][
        :5
    ]
    tools = [report["summary"][name] for name in ("graphquant", "onnxruntime MinMax", "NNCF")]
    assert head[0].startswith(f"{tools[0]['models']} ONNX models")
    relative_seconds = [1.0, *(tool["median_relative_seconds"] for tool in tools[1:])]
    assert [row[1:] for row in rows] == [
        [f"{tool['at_least_20_db']}" for tool in tools],
        [f"{tool['median_ratio']:.2f}" for tool in tools],
        [f"{seconds:.2f}" for seconds in relative_seconds],
    ]
    versions = re.findall(r"(ONNX Runtime|NNCF) (\d[\d.]*\d)", section)
    assert dict(versions) == {"ONNX Runtime": report["versions"]["onnxruntime"], "NNCF": report["versions"]["nncf"]}


def test_comparison_has_ten_rows():
    """The table of properties has a row for each of ten properties, and a column for each of five tools."""
    table = TEXT.partition("\n| | graphquant | ")[2].partition("\n\n")[0].splitlines()
    assert [line.count("|") for line in table[2:]] == [7] * 10
