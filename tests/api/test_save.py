"""Writing models."""

import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import graphquant as gq
from graphquant.errors import UsageError

MODELS = Path(__file__).parents[2] / "sample_models"


@pytest.mark.parametrize(("source", "target"), [("digits_cnn.onnx", "out.pb"), ("digits_cnn.pb", "out.onnx")])
def test_suffix_of_another_format(tmp_path, source, target):
    """A model is not written under a suffix by which it would be read as something else."""
    with pytest.raises(UsageError, match=r"has the suffix '\.\w+'"):
        gq.save(gq.load(MODELS / source), tmp_path / target)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["model", "statistics"])
def test_two_processes_save_to_one_output(tmp_path, kind):
    """The second one is refused while the first one writes, and what the first one wrote stays."""
    path = tmp_path / ("out.onnx" if kind == "model" else "out.gqs")
    model = gq.load(MODELS / "digits_cnn.onnx")
    if kind == "model":
        save = partial(gq.save, model, path, force=True)
    else:
        data = str(MODELS / "digits_cnn_calib.npz")
        save = gq.calibrate(model, gq.plan(model, rules="onnxruntime"), data, samples=4).save
        save = partial(save, path)
    script = (
        "import sys; from pathlib import Path; from graphquant.utils.atomic_files import lock_output\n"
        "with lock_output(Path(sys.argv[1])): print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(UsageError):
            save()
        assert not path.exists()
        process.communicate(b"")
    save()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_output_that_appears_before_the_lock(tmp_path, monkeypatch):
    """A file that another process wrote between the check of the output and its lock stays."""
    path = tmp_path / "out.onnx"

    @contextmanager
    def write_before_lock(output):
        output.write_bytes(b"other")
        yield

    monkeypatch.setattr("graphquant.api.models.lock_output", write_before_lock)
    with pytest.raises(UsageError):
        gq.save(gq.load(MODELS / "digits_cnn.onnx"), path)
    assert path.read_bytes() == b"other"
