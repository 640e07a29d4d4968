"""Bad input ends with a clear message on stderr, the right exit code, no traceback, and nothing changed on disk."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import graphquant as gq

if TYPE_CHECKING:
    from collections.abc import Callable

CNN = "digits_cnn.onnx"
MODELS = (CNN, "digits_cnn.pb", "digits_cnn.pbtxt", "digits_cnn_saved_model")
WEIGHTS = ("--rules", "weight_only")
IMAGES = np.linspace(0, 1, 4 * 64, dtype=np.float32).reshape(4, 8, 8, 1)


@pytest.fixture
def models_folder(samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own folder with the models in it, the current one."""
    for name in MODELS:
        (shutil.copytree if (samples / name).is_dir() else shutil.copy)(samples / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(cli: Callable[..., Any], models_folder: Path) -> Callable[..., str]:
    """Return a function that calls graphquant, which must fail and change no file, and returns stderr."""

    def call(*arguments: object, code: int) -> str:
        before = contents(models_folder)
        result = cli(*arguments, code=code)
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        assert contents(models_folder) == before
        return str(result.stderr)

    return call


def contents(folder: Path) -> dict[str, str]:
    """Each file and folder with a digest of its content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def file_of(name: str) -> Path:
    """The file that holds the model."""
    return Path(name) / "saved_model.pb" if Path(name).is_dir() else Path(name)


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("verb", ["insert", "plan", "inspect"])
def test_empty_model(refused: Callable[..., str], name: str, verb: str) -> None:
    """An empty file is called that, with its path."""
    file_of(name).write_bytes(b"")
    assert f"{file_of(name)}" in (text := refused(verb, name, code=3))
    assert "empty" in text


@pytest.mark.parametrize("name", MODELS)
def test_truncated_model(refused: Callable[..., str], name: str) -> None:
    """A file that is cut off is refused with its name; one node's end is no end of a model."""
    content = file_of(name).read_bytes()
    rng = random.Random(name)  # noqa: S311  # not a secret
    sizes = [1, 10, len(content) // 3, len(content) // 2, len(content) - 2]
    for size in (*sizes, *(rng.randrange(len(content)) for _ in range(5))):
        file_of(name).write_bytes(content[:size])
        text = refused("insert", name, *WEIGHTS, code=3)
        assert name in text


@pytest.mark.parametrize("name", MODELS)
def test_bit_flipped_model(cli: Callable[..., Any], models_folder: Path, name: str) -> None:
    """A file with flipped bits is rejected with exit code 3, or gives a valid model; no partial file remains."""
    content = bytearray(file_of(name).read_bytes())
    rng = random.Random(name)  # noqa: S311  # not a secret
    out = Path("out") if Path(name).is_dir() else Path("out").with_suffix(Path(name).suffix)
    for _ in range(12):
        spoilt = bytearray(content)
        for _ in range(20):
            spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
        file_of(name).write_bytes(spoilt)
        before = contents(models_folder)
        try:
            cli("insert", name, *WEIGHTS, "-o", out, code=3)
        except AssertionError:
            cli("insert", name, *WEIGHTS, "-o", out, "--force")
            gq.load(out)
            shutil.rmtree(out) if out.is_dir() else out.unlink()
        assert contents(models_folder) == before


def test_folder_and_missing_file(refused: Callable[..., str]) -> None:
    """A folder that is no SavedModel, a missing path and a file of another kind have different messages."""
    Path("folder").mkdir()
    Path("model.bin").write_bytes(b"\x89HDF")
    assert "folder without saved_model.pb" in refused("insert", "folder", code=3)
    text = refused("insert", "digits.onnx", code=3)
    assert "no file digits.onnx." in text
    assert "'digits_cnn.onnx'" in text
    text = refused("inspect", "model.bin", code=3)
    assert "unknown suffix '.bin'" in text
    assert ".onnx" in text


def test_models_of_another_kind(refused: Callable[..., str]) -> None:
    """A model with the suffix of another format is rejected because of its content."""
    for source, name in ((CNN, "a.pb"), ("digits_cnn.pb", "b.onnx"), (CNN, "c.pbtxt"), ("digits_cnn.pbtxt", "d.onnx")):
        shutil.copy(source, name)
        assert name in refused("plan", name, code=3)


def test_missing_external_data(refused: Callable[..., str]) -> None:
    """Weights in a file that is not there are named."""
    import onnx

    model = onnx.load(CNN)
    onnx.save(model, "big.onnx", save_as_external_data=True, location="weights.bin", size_threshold=16)
    Path("weights.bin").unlink()
    assert "weights.bin" in refused("insert", "big.onnx", *WEIGHTS, code=3)


@pytest.mark.parametrize("part", ["variables.index", "variables.data-00000-of-00001"])
def test_damaged_checkpoint(refused: Callable[..., str], part: str) -> None:
    """A flipped bit in a SavedModel's variables is noticed by the checksum, and the file is named."""
    path = Path("digits_cnn_saved_model/variables") / part
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)
    assert "variables" in refused("insert", "digits_cnn_saved_model", *WEIGHTS, "-o", "out", code=3)


# -- rules and selectors ---------------------------------------------------------------------------

MISTAKES = """\
[scheme.a]
zero = "symetric"

[[rule]]
name = "one"
consumer = { kind = "conf" }
quantize = "a"

[[rule]]
name = "two"
consumer = { kind = "conv", input = "wieght" }
quantize = "b"
"""


@pytest.mark.parametrize("arguments", [("insert", CNN), ("plan", CNN), ("explain", CNN, "stem/relu")])
def test_rule_file_with_four_mistakes(refused: Callable[..., str], arguments: tuple[str, ...]) -> None:
    """All four mistakes are listed at once, each with its line and a suggestion."""
    Path("mine.toml").write_text(MISTAKES)
    text = refused(*arguments, "--rules", "mine.toml", code=2)
    lines = [line.removeprefix("error: ") for line in text.splitlines()]
    assert [line.split(":")[:2] for line in lines] == [["mine.toml", number] for number in ("2", "6", "11", "12")]
    for line, word in zip(lines, ("'symmetric'", "'conv'", "'weight'", "Known are a,"), strict=True):
        assert word in line


def test_file_that_is_not_a_rule_file(refused: Callable[..., str]) -> None:
    """A missing file, a folder and text that is no TOML."""
    Path("folder.toml").mkdir()
    Path("text.toml").write_text("[[rule]\nname = 1\n")
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "onnxruntime" in refused("plan", CNN, "--rules", "onnxruntme", code=2)
    assert "missing.toml" in refused("plan", CNN, "--rules", "missing.toml", code=2)
    assert "folder.toml" in refused("plan", CNN, "--rules", "folder.toml", code=2)
    assert "text.toml:1:" in refused("plan", CNN, "--rules", "text.toml", code=2)
    assert "binary.toml" in refused("plan", CNN, "--rules", "binary.toml", code=2)


@pytest.mark.parametrize("option", ["--include", "--exclude"])
def test_pattern_without_a_match(refused: Callable[..., str], option: str) -> None:
    """The message suggests the nearest names."""
    text = refused("insert", CNN, *WEIGHTS, option, "residual_1/konv", code=2)
    assert f"{option} 'residual_1/konv' matches no " in text
    assert "residual_1/conv" in text
    for regex in ("/(/", "/(?=a)/"):
        assert f"{regex!r} of {option}" in refused("insert", CNN, option, regex, code=2)


def test_rule_name_without_a_match(refused: Callable[..., str]) -> None:
    """The rule's file and line, and the nearest names."""
    Path("mine.toml").write_text('\n[[rule]]\nname = "r"\nproducer = { name = "stem/relo" }\nquantize = "float"\n')
    text = refused("plan", CNN, "--rules", "mine.toml", code=2)
    assert "mine.toml" in text
    assert "stem/relo" in text
    assert "stem/relu" in text


def test_unknown_family(refused: Callable[..., str]) -> None:
    """A family of another format is rejected, and the message lists the valid ones."""
    assert "onnx-qdq" in refused("insert", CNN, "--family", "fake-quant", code=2)


# -- data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"imgae": IMAGES}, "imgae"),
        ({"image": IMAGES[..., :4, :]}, "[4, 8, 4, 1]"),
        ({"image": IMAGES.reshape(4, 64)}, "reshape(-1, 8, 8, 1)"),
        ({"image": (IMAGES * 255).astype(np.uint8)}, "uint8"),
        ({"image": IMAGES.astype(np.complex64)}, "complex64"),
        ({"image": IMAGES.astype(str)}, "<U"),
        ({"image": np.where(IMAGES > 0.9, np.nan, IMAGES)}, "NaN"),
        ({"image": np.where(IMAGES > 0.9, np.inf, IMAGES)}, "infinite"),
        ({"image": IMAGES[:0]}, "no samples"),
        ({}, "image"),
    ],
)
def test_data_that_does_not_fit(refused: Callable[..., str], arrays: dict[str, Any], said: str) -> None:
    """Name, shape, type and values are checked before the model is run."""
    np.savez("data.npz", **arrays)
    text = refused("insert", CNN, "--data", "data.npz", code=2)
    assert "data.npz" in text
    assert said in text


def test_file_that_is_not_data(refused: Callable[..., str]) -> None:
    """A missing file, a folder, a damaged archive, another kind of file, pickled objects."""
    Path("folder.npz").mkdir()
    Path("text.npz").write_text("no zip")
    np.savez("objects.npz", image=np.array([{}, []], dtype=object))
    np.savez("cut.npz", image=IMAGES)
    Path("cut.npz").write_bytes(Path("cut.npz").read_bytes()[:500])
    for name in ("missing.npz", "folder.npz", "text.npz", "objects.npz", "cut.npz", "data.csv", "random:x", "random:0"):
        assert name in refused("insert", CNN, "--data", name, code=2)


# -- outputs ---------------------------------------------------------------------------------------


def test_unwritable_output(refused: Callable[..., str]) -> None:
    """A path below a file, a place that takes no files, and a folder in the way."""
    Path("file").write_text("text")
    Path("full").mkdir()
    Path("full/keep").write_text("text")
    for out in ("file/out.onnx", "/proc/out.onnx", "/sys/kernel/out.onnx", "/dev/null/out.onnx"):
        for force in ([], ["--force"]):
            assert str(Path(out).parent) in refused("insert", CNN, *WEIGHTS, "-o", out, *force, code=2)
    assert "full" in refused("insert", CNN, *WEIGHTS, "-o", "full", "--force", code=2)
    assert "full" in refused("insert", "digits_cnn_saved_model", *WEIGHTS, "-o", "full", "--force", code=2)
    assert "file" in refused("insert", "digits_cnn_saved_model", *WEIGHTS, "-o", "file", "--force", code=2)
    for verb in ("plan", "inspect"):
        assert "file" in refused(verb, CNN, "-o", "file/new/out.txt", code=2)
        assert "/proc" in refused(verb, CNN, "-o", "/proc/out.txt", code=2)
        assert "full" in refused(verb, CNN, "-o", "full", "--force", code=2)
    for report in ("file/report.json", "/proc/report.json", "full"):
        assert str(Path(report).parent) in refused("insert", CNN, *WEIGHTS, "--report", report, code=2)


def test_output_of_a_read_only_folder(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Permission errors of the operating system are reported."""
    Path("locked").mkdir()

    def denied(*_arguments: object, **_options: object) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", denied)
    assert "Permission denied" in refused("insert", CNN, *WEIGHTS, "-o", "locked/out.onnx", code=2)
    assert "Permission denied" in refused("insert", "digits_cnn.pb", *WEIGHTS, "-o", "locked/out.pb", code=2)
    assert "Permission denied" in refused("insert", "digits_cnn_saved_model", *WEIGHTS, "-o", "locked/out", code=2)
    assert "Permission denied" in refused("inspect", CNN, "-o", "locked/out.txt", code=2)


@pytest.mark.parametrize("name", MODELS)
def test_existing_output_and_the_source_as_output(refused: Callable[..., str], name: str) -> None:
    """Existing files stay; the source is never overwritten, not even with --force or through another name."""
    suffix = Path(name).suffix
    Path(f"there{suffix}").write_text("precious")
    assert "--force" in refused("insert", name, *WEIGHTS, "-o", f"there{suffix}", code=2)
    for same in (name, f"./{name}", Path(name).absolute()):
        for force in ([], ["--force"]):
            assert f"{Path(name).name} is the source" in refused("insert", name, *WEIGHTS, "-o", same, *force, code=2)
    message = "folder of the source" if Path(name).is_dir() else "is the source"
    assert message in refused("insert", name, *WEIGHTS, "--report", file_of(name), code=2)
    for verb in ("plan", "inspect"):
        assert message in refused(verb, name, "-o", file_of(name), "--force", code=2)
    for out in (f"{name}/new", f"{name}/variables") if Path(name).is_dir() else ():
        assert message in refused("insert", name, *WEIGHTS, "-o", out, "--force", code=2)


def test_links_to_the_input_are_the_input(refused: Callable[..., str]) -> None:
    """Symbolic and hard links do not get around it."""
    Path("link.onnx").symlink_to(CNN)
    os.link(CNN, "hard.onnx")
    for out in ("link.onnx", "hard.onnx"):
        assert f"{out} is the source" in refused("insert", CNN, *WEIGHTS, "-o", out, "--force", code=2)
    assert f"{CNN} is the source" in refused("insert", "link.onnx", *WEIGHTS, "-o", CNN, "--force", code=2)


@pytest.mark.parametrize(
    ("name", "out", "suffix"),
    [
        (CNN, "out.pb", ".onnx"),
        (CNN, "out", ".onnx"),
        (CNN, "out.txt", ".onnx"),
        (CNN, "out.tflite", ".onnx"),
        ("digits_cnn.pb", "out.onnx", ".pb"),
        ("digits_cnn.pbtxt", "out.json", ".pb"),
        ("digits_cnn.pb", "out", ".pb"),
        ("digits_cnn_saved_model", "out.pb", "folder"),
        ("digits_cnn_saved_model", "out.onnx", "folder"),
    ],
)
def test_output_of_another_format(refused: Callable[..., str], name: str, out: str, suffix: str) -> None:
    """A suffix of another format is rejected before any work, with a valid suffix."""
    text = refused("insert", name, *WEIGHTS, "-o", out, code=2)
    assert text.startswith(f"error: {out} ")
    assert suffix in text


def test_report_and_output_are_two_files(refused: Callable[..., str]) -> None:
    """A report in the place of the model would replace it."""
    text = refused("insert", CNN, *WEIGHTS, "-o", "out.onnx", "--report", "./out.onnx", code=2)
    assert "--report" in text


def test_pipes_and_links_as_outputs(refused: Callable[..., str]) -> None:
    """Devices, pipes and links are never replaced, for models and reports."""
    os.mkfifo("pipe.onnx")
    Path("target").write_text("precious")
    Path("link.onnx").symlink_to("target")
    Path("loop.onnx").symlink_to("loop.onnx")
    for name, message in (
        ("pipe.onnx", "a pipe"),
        ("link.onnx", "is a symbolic link"),
        ("loop.onnx", "is a symbolic link"),
    ):
        assert message in refused("insert", CNN, *WEIGHTS, "-o", name, "--force", code=2)
        assert message in refused("insert", CNN, *WEIGHTS, "--report", name, code=2)
        assert message in refused("plan", CNN, "-o", name, "--force", code=2)
    assert Path("pipe.onnx").is_fifo()
    assert Path("link.onnx").readlink() == Path("target")


def test_names_too_long(refused: Callable[..., str]) -> None:
    """Invalid file names are rejected for each path argument."""
    name = "x" * 300
    for arguments in (
        ("plan", f"{name}.onnx"),
        ("insert", CNN, "--data", f"{name}.npz"),
        ("insert", CNN, "-o", f"{name}.onnx", *WEIGHTS),
        ("insert", CNN, "--plan", f"{name}.json"),
        ("rules", "check", f"{name}.toml"),
        ("rules", "show", name),
    ):
        assert "File name too long" in refused(*arguments, code=2)


def test_plan_without_an_end(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A device has no size, and is read no further than any plan goes."""
    monkeypatch.setattr("graphquant.quantize.plan.MAX_PLAN_BYTES", 1 << 16)
    assert "/dev/zero" in refused("insert", CNN, "--plan", "/dev/zero", code=2)


def test_folder_without_a_name(refused: Callable[..., str], cli: Callable[..., Any], models_folder: Path) -> None:
    """An empty path is no model; the current folder may be a SavedModel, with the output next to it."""
    assert "without saved_model.pb" in refused("insert", "", code=3)
    os.chdir("digits_cnn_saved_model")
    cli("insert", ".", *WEIGHTS)
    assert (models_folder / "digits_cnn_saved_model.quant" / "saved_model.pb").is_file()


def test_skips_of_unknown_ops(samples: Path) -> None:
    """A stored plan whose skips name ops that the model lacks inserts the pairs of its sites."""
    model, data = samples / CNN, str(samples / "digits_cnn_calib.npz")
    plan = gq.plan(model, rules=["onnxruntime"])
    skips = [replace(skip, uses=tuple(use._replace(op="missing") for use in skip.uses)) for skip in plan.skips]
    assert any(skip.fused for skip in skips)
    result = gq.insert(model, plan=replace(plan, skips=tuple(skips)), data=data, samples=8, validate=False)
    assert len(result.inserted) == len(plan.sites)


@pytest.mark.parametrize("name", ["model.onnx", "model.pb", "model.tflite", "data.npz"])
def test_pointers_of_git_lfs(refused: Callable[..., str], models_folder: Path, name: str) -> None:
    """A pointer that Git LFS stores in place of a file is named as such."""
    (models_folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12\n")
    if name == "data.npz":
        assert "git lfs pull" in refused("insert", CNN, "--data", name, code=2)
    else:
        assert "git lfs pull" in refused("inspect", name, code=3)


@pytest.mark.parametrize(
    ("source", "name", "advice"), [(CNN, "model.pb", "model.onnx"), ("digits_cnn.pb", "model.onnx", "model.pb")]
)
def test_models_with_the_suffix_of_another_format(
    refused: Callable[..., str], models_folder: Path, source: str, name: str, advice: str
) -> None:
    """A model whose suffix belongs to another format gives the name that fits."""
    (models_folder / source).rename(models_folder / name)
    assert f"Rename it to {advice}." in refused("insert", name, *WEIGHTS, code=3)
