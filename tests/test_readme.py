"""README.md: Python examples run, and outputs, tables and links are up to date."""

import re
from pathlib import Path

from support.cli import invoke_cli, run_cli
from support.documents import code_blocks

from graphquant.errors import GraphQuantError
from graphquant.rules import load_ruleset, shipped_rule_files

ROOT = Path(__file__).parent.parent
TEXT = ROOT.joinpath("README.md").read_text("utf-8")


def test_python_runs(tmp_path, monkeypatch, capsys):
    """The Python example runs, and does not quantize the ops that it excludes."""
    tmp_path.joinpath("sample_models").symlink_to(ROOT / "sample_models")
    monkeypatch.chdir(tmp_path)
    (code,) = code_blocks(TEXT, "python")
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102  # README's own code
    printed = capsys.readouterr().out
    assert "residual/relu:0 joint-output" in printed
    assert "logits" not in printed
    assert tmp_path.joinpath("digits_cnn.quant.onnx").is_file()


def test_first_command_ends_as_shown(tmp_path):
    """The first command prints the line that README shows."""
    model, data = (ROOT / "sample_models" / name for name in ("digits_cnn.onnx", "digits_cnn_calib.npz"))
    result = invoke_cli("insert", model, "--data", data, "-o", tmp_path / "out.onnx")
    (summary_line,) = re.findall(r"^ {4}(\d+ sites inserted.*?) Written to", TEXT, re.MULTILINE)
    assert result.stdout.splitlines()[-1].startswith(f"{summary_line} Written to")


def test_check_ends_as_shown(tmp_path):
    """The check command prints the line that README shows."""
    model, data = (ROOT / "sample_models" / name for name in ("digits_cnn_bn.onnx", "digits_cnn_calib.npz"))
    quantized = tmp_path / "out.onnx"
    run_cli("insert", model, "--data", data, "-o", quantized)
    result = invoke_cli("check", quantized, "--for", "onnxruntime")
    (summary_line,) = re.findall(r"^ {4}(\d+ of \d+ ops run in low precision.*)$", TEXT, re.MULTILINE)
    assert result.stdout.splitlines()[0].endswith(f" for onnxruntime: {summary_line}")


def test_rule_file_has_eight_lines(tmp_path):
    """README's rule file has eight lines and is valid."""
    (text,) = re.findall(r"<<'END'\n(.*?)^END$", TEXT, re.DOTALL | re.MULTILINE)
    assert len(text.splitlines()) == 8
    file = tmp_path / "mine.toml"
    file.write_text(text, "utf-8")
    assert [rule.rule.name for rule in load_ruleset([str(file)]).rules] == ["block-input"]


def test_targets_are_the_shipped_rules():
    """The target table has a row for each shipped rule file."""
    table = TEXT.partition("## Targets")[2].partition("## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == sorted(shipped_rule_files())


def test_exit_codes_are_all_listed():
    """The table of exit codes has the code of every error class."""
    table = TEXT.partition("## Exit codes")[2].partition("## ")[0]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert listed == {kind.exit_code for kind in GraphQuantError.__subclasses__()} | {0, 130}


def test_two_set_up_commands():
    """There are exactly two set-up commands, of one line each, before the heading "Commands"."""
    before = TEXT.partition("\n## Commands\n")[0]
    commands = re.findall(r"^```bash\n(.*?)^```$", before, re.DOTALL | re.MULTILINE)
    assert [block.count("\n") for block in commands] == [1, 1]


def test_links_are_valid():
    """Pictures and relative links name existing files."""
    targets = re.findall(r'(?:\]\(|src=")([^)"#]+)', TEXT)
    assert [target for target in targets if "://" not in target and not ROOT.joinpath(target).exists()] == []
