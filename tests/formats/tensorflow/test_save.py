"""Models are saved atomically, in their original form, with all their files."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from graphquant.api.models import model_files
from graphquant.errors import ModelError, UsageError
from graphquant.formats.tensorflow import emit, load, save, source
from graphquant.ir import Use, paused_gc

ROOT = Path(__file__).parents[3]
SAMPLES = ROOT / "sample_models"


def model_without_identity(path: Path):
    """Return a loaded model without the Identity of its last output."""
    model = load(path).copy()
    use = Use("", model.main.outputs[0], 0)
    tensor = model.main.source_of(use)
    op = model.main.op(tensor.op)
    with paused_gc():
        same = model.main.add_op(
            type(op)(name="same", kind="identity", type="Identity", outputs=(op.outputs[0],), rule="test"), [tensor]
        )
    model.main.set_source(use, same)
    return model


@pytest.mark.parametrize("name", ["digits_cnn.pb", "digits_cnn.pbtxt", "digits_rnn.pb"])
def test_unchanged_bytes(tmp_path: Path, name: str) -> None:
    """An unedited file is written with the same bytes."""
    save(load(SAMPLES / name), tmp_path / name)
    assert (tmp_path / name).read_bytes() == (SAMPLES / name).read_bytes()


def test_text_and_binary(tmp_path: Path) -> None:
    """The suffix of the output selects text or binary, with the same message."""
    model = model_without_identity(SAMPLES / "digits_cnn.pb")
    save(model, tmp_path / "one.pbtxt")
    save(model, tmp_path / "two.pb")
    text_model, binary_model = load(tmp_path / "one.pbtxt"), load(tmp_path / "two.pb")
    assert (text_model.source.text, binary_model.source.text) == (True, False)
    assert text_model.source.message == binary_model.source.message == emit(model)
    assert text_model.main.outputs == ["@same"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.pbtxt", "two.pb"]


def test_saved_model(tmp_path: Path) -> None:
    """A SavedModel's variables are copied, its stale fingerprint is not; an unchanged model has all its files."""
    folder = SAMPLES / "digits_cnn_saved_model"
    out = tmp_path / "out"
    save(load(folder), out)
    files = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert {path.relative_to(out) for path in out.rglob("*") if path.is_file()} == files
    assert all((out / name).read_bytes() == (folder / name).read_bytes() for name in files)
    save(model_without_identity(folder), out)
    assert {path.relative_to(out) for path in out.rglob("*") if path.is_file()} == files - {Path("fingerprint.pb")}
    assert load(out).main.slots("@serving_default/probabilities")[0].op == "same"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_in_place(tmp_path: Path) -> None:
    """A SavedModel can be overwritten with itself."""
    out = tmp_path / "model"
    shutil.copytree(SAMPLES / "digits_rnn_saved_model", out)
    save(model_without_identity(out), out)
    assert load(out).main.slots("@serving_default/probabilities")[0].op == "same"
    assert load(out).source.checkpoint().checkpoint is not None


def test_refused_targets(tmp_path: Path) -> None:
    """Other folders, a folder in place of a file, and a file in place of a folder are refused and unchanged."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "note").write_text("mine")
    with pytest.raises(UsageError, match="SavedModel"):
        save(load(SAMPLES / "digits_cnn_saved_model"), tmp_path / "kept")
    with pytest.raises(UsageError, match="is a folder"):
        save(load(SAMPLES / "digits_cnn.pb"), tmp_path / "kept")
    with pytest.raises(UsageError, match="cannot be written"):
        save(load(SAMPLES / "digits_cnn.pb"), tmp_path / "kept" / "note" / "model.pb")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "note"]


def test_failed_save_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a SavedModel cannot be completed, nothing of it remains."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    # The package's attribute of that name is the function.
    monkeypatch.setattr(sys.modules["graphquant.formats.tensorflow.save"], "atomic_file", refuse)
    with pytest.raises(UsageError, match="No space left"):
        save(model_without_identity(SAMPLES / "digits_cnn_saved_model"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_message_type_is_detected_by_content(tmp_path: Path) -> None:
    """A SavedModel message in a file of another name is detected by its content."""
    shutil.copy(SAMPLES / "digits_cnn_saved_model" / "saved_model.pb", tmp_path / "frozen.pb")
    model_source = source.read_source(tmp_path / "frozen.pb")
    assert (model_source.message_type, model_source.text, model_source.checkpoint_prefix()) == (
        "SavedModel",
        False,
        None,
    )
    assert load(tmp_path / "frozen.pb").main.op("Variable").read_value is None


@pytest.mark.parametrize(
    ("links", "match"),
    [
        ({"zero": "/dev/zero"}, "/zero"),
        ({"assets/one": "..", "assets/two": ".."}, "assets/(one|two)"),
        ({"assets/out": "/"}, "assets/out"),
        ({"gone": "/nowhere"}, "/gone"),
        ({"assets/deep": "/etc/hostname"}, "assets/deep"),
        ({"gone": "nowhere"}, "/gone "),
    ],
)
def test_links_in_a_saved_model(tmp_path: Path, links: dict[str, str], match: str) -> None:
    """Devices, link cycles and links to outside folders are refused; nothing remains."""
    source_ = tmp_path / "model"
    shutil.copytree(SAMPLES / "digits_cnn_saved_model", source_)
    (source_ / "assets").mkdir(exist_ok=True)
    for name, target in links.items():
        (source_ / name).symlink_to(target)
    with pytest.raises((UsageError, ModelError), match=match):
        save(load(source_), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["saved_model.pb", "variables/variables.index", "assets.extra/secret"])
def test_links_out_of_a_saved_model_need_the_option(tmp_path: Path, name: str) -> None:
    """A file that is a link out of the folder is read and copied only with the option, which the error names."""
    shutil.copytree(SAMPLES / "digits_cnn_saved_model", tmp_path / "model")
    file, target = tmp_path / "model" / name, tmp_path / "blob"
    file.parent.mkdir(exist_ok=True)
    if file.exists():
        file.rename(target)
    else:
        target.write_text("secret")
    file.symlink_to("../" * (name.count("/") + 1) + "blob")
    with pytest.raises(ModelError, match="--allow-links"):
        load(tmp_path / "model")
    with pytest.raises(ModelError, match="--allow-links"):
        model_files(tmp_path / "model")
    model = load(tmp_path / "model", allow_links=True)
    save(model, tmp_path / "out")
    copied = model_files(tmp_path / "out")
    assert [path.relative_to(tmp_path / "out") for path in copied] == [
        path.relative_to(tmp_path / "model") for path in model_files(tmp_path / "model", allow_links=True)
    ]
    assert (tmp_path / "out" / name).read_bytes() == target.read_bytes()
    assert not any(path.is_symlink() for path in copied)


def test_links_of_a_checkpoint_need_the_option(tmp_path: Path) -> None:
    """The checkpoint of a MetaGraph may be a link out of its folder only with the option."""
    folder = tmp_path / "model"
    folder.mkdir()
    path = folder / "net.meta"
    message = load(SAMPLES / "digits_cnn_saved_model").source.message
    path.write_bytes(message.meta_graphs[0].SerializeToString())
    for file in (SAMPLES / "digits_cnn_saved_model/variables").iterdir():
        (folder / f"net{file.suffix}").symlink_to(file)
    with pytest.raises(ModelError, match="--allow-links"):
        load(path)
    assert load(path, allow_links=True).source.checkpoint_prefix() == folder / "net"
