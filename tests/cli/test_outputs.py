"""Commands with several outputs, of which a later one cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import graphquant as gq
from graphquant.cli import output as command_output
from graphquant.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

COMMANDS = {
    "insert --report": (
        ("insert", "MODEL", "--data", "DATA", "--no-validate", "-o", "OUT/q.onnx", "--report", "OUT/fails.json"),
        ("q.onnx",),
    ),
    "insert --html": (
        (
            *("insert", "MODEL", "--data", "DATA", "--no-validate", "-o", "OUT/q.onnx"),
            *("--report", "OUT/r.json", "--html", "OUT/fails.html"),
        ),
        ("q.onnx", "r.json"),
    ),
    "insert --dry-run": (
        ("insert", "MODEL", "--data", "DATA", "--no-validate", "--dry-run", "--report", "OUT/fails.json"),
        (),
    ),
    "plan": (("plan", "MODEL", "--html", "OUT/p.html", "-o", "OUT/fails.txt"), ("p.html",)),
    "inspect": (
        ("inspect", "MODEL", "--html", "OUT/p.html", "--format", "dot", "-o", "OUT/fails.dot"),
        ("p.html",),
    ),
    "compare": (
        ("compare", "MODEL", "MODEL", "--data", "DATA", "-o", "OUT/c.txt", "--html", "OUT/fails.html"),
        ("c.txt",),
    ),
    "diff": (("diff", "MODEL", "MODEL", "-o", "OUT/d.txt", "--html", "OUT/fails.html"), ("d.txt",)),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_error_names_the_outputs_that_were_written(
    case: str, samples: Path, tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an output cannot be written, the message names the ones before it, and nothing else."""
    write_file = command_output.write_file

    def fail_on_last_output(path: Path, content: Any) -> None:
        if path.stem == "fails":
            raise UsageError(f"{path} cannot be written: No space left on device. Use another file.")
        write_file(path, content)

    monkeypatch.setattr(command_output, "write_file", fail_on_last_output)
    arguments, written = COMMANDS[case]
    model, data = str(samples / "digits_cnn.onnx"), str(samples / "digits_cnn_calib.npz")
    texts = [text.replace("MODEL", model).replace("DATA", data).replace("OUT", str(tmp_path)) for text in arguments]
    problem, *notes = cli(*texts, code=2).stderr.splitlines()[-1 - len(written) :]
    assert "fails" in problem
    assert [note.split()[1] for note in notes] == [str(tmp_path / name) for name in written]
    assert {path.name for path in tmp_path.iterdir()} == set(written)


@pytest.mark.parametrize("command", ["insert", "calibrate", "strip"])
def test_full_standard_output(
    command: str, samples: Path, tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the result cannot be printed, the message names the model or the statistics that were written."""
    model, data = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz"
    quantized, output = tmp_path / "q.onnx", tmp_path / "out.onnx"
    if command == "strip":
        cli("insert", model, "--data", data, "--no-validate", "-o", quantized)
        model = quantized
    if command == "calibrate":
        output = tmp_path / "out.gqs"
    options = () if command == "strip" else ("--data", data)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"graphquant.cli.{command if command == 'calibrate' else 'insert'}.print_view", fail)
    assert str(output) in cli(command, model, *options, "-o", output, code=2).stderr
    assert output.exists()


FOLDERS = {
    **{name: arguments for name, (arguments, _) in COMMANDS.items()},
    "calibrate": ("calibrate", "MODEL", "--data", "DATA", "--samples", "4", "-o", "OUT/s.gqs"),
    "strip": ("strip", "QUANTIZED", "-o", "OUT/float.onnx"),
    "insert --export-ranges": (
        *("insert", "MODEL", "--data", "DATA", "--no-validate", "-o", "OUT/a/q.onnx"),
        *("--export-ranges", "OUT/b/q.encodings"),
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_missing_folders_of_outputs_are_created(
    case: str, samples: Path, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    """Each command creates the folders of its outputs, and refuses at once a folder whose name is that of a file."""
    values = {"MODEL": str(samples / "digits_cnn.onnx"), "DATA": str(samples / "digits_cnn_calib.npz")}
    if case == "strip":
        values["QUANTIZED"] = str(gq.insert(values["MODEL"], rules="weight_only").save(tmp_path / "q.onnx"))

    def texts(out: Path) -> list[str]:
        filled = list(FOLDERS[case])
        for key, value in {**values, "OUT": str(out)}.items():
            filled = [text.replace(key, value) for text in filled]
        return filled

    cli(*texts(tmp_path / "new" / "deep"))
    outputs = [Path(text) for text in texts(tmp_path / "new" / "deep") if str(tmp_path / "new") in text]
    assert [path.is_file() for path in outputs] == [True] * len(outputs)
    (tmp_path / "file").touch()
    assert "is a file" in cli(*texts(tmp_path / "file"), code=2).stderr
