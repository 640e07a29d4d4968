"""The command line where it draws: pages, pictures, neighbourhoods."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from graphquant.errors import escape_unprintable

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def drawing_folder(samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a sample model and its data."""
    for name in ("digits_cnn.onnx", "digits_cnn_calib.npz"):
        (tmp_path / name).write_bytes((samples / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_page_of_each_verb(cli: Callable[..., Any], drawing_folder: Path) -> None:
    """inspect, plan and insert write different pages, and report their paths."""
    cli("inspect", "digits_cnn.onnx", "--html", "inspect.html")
    result = cli("plan", "digits_cnn.onnx", "--html", "plan.html")
    assert (result.stdout, result.stderr) == (cli("plan", "digits_cnn.onnx").stdout, "Written to plan.html\n")
    result = cli("insert", "digits_cnn.onnx", "--data", "digits_cnn_calib.npz", "--html", "insert.html")
    assert result.stderr == "Written to insert.html\n"
    assert "tensors quantized" in result.stdout
    cli("calibrate", "digits_cnn.onnx", "--data", "digits_cnn_calib.npz", "-o", "stats.gqs")
    cli("inspect", "digits_cnn.onnx", "--stats", "stats.gqs", "--html", "stats.html")
    cli("inspect", "digits_cnn.quant.onnx", "--stats", "stats.gqs", "--html", "named.html")
    pages = [Path(f"{name}.html").read_text("utf-8") for name in ("inspect", "plan", "insert", "stats", "named")]
    assert len(set(pages)) == len(pages)
    assert all(page.startswith("<!DOCTYPE html>") and page.endswith("</script></body></html>\n") for page in pages)


def test_a_dry_run_draws(cli: Callable[..., Any], drawing_folder: Path) -> None:
    """--dry-run writes no model, and the page that was asked for."""
    cli("insert", "digits_cnn.onnx", "--rules", "fixed_point", "--dry-run", "--html", "dry.html")
    assert {path.name for path in drawing_folder.iterdir()} == {"digits_cnn.onnx", "digits_cnn_calib.npz", "dry.html"}


def test_random_data_is_reported(cli: Callable[..., Any], drawing_folder: Path) -> None:
    """A page with histograms of random data is marked."""
    from base64 import b64decode
    from zlib import decompress

    cli("insert", "digits_cnn.onnx", "--data", "random:1", "--html", "random.html")
    packed = re.search(r'octet-stream">([^<]*)<', Path("random.html").read_text("utf-8"))[1]
    (note,) = json.loads(decompress(b64decode(packed)))["notes"]
    assert "RANDOM" in note


@pytest.mark.parametrize("form", ["svg", "dot", "graphml", "graph-json"])
def test_pictures_and_data(cli: Callable[..., Any], drawing_folder: Path, form: str) -> None:
    """Each format is written to stdout or a file, for the whole model or the neighborhood of an op."""
    output = cli("inspect", "digits_cnn.onnx", "--format", form).stdout
    cli("inspect", "digits_cnn.onnx", "--format", form, "-o", "out")
    assert Path("out").read_text("utf-8") == output
    near = cli("inspect", "digits_cnn.onnx", "--format", form, "--around", "stem/relu", "--hops", "1").stdout
    assert len(near) < len(output)
    for name, times in (("Relu", True), ("Softmax", False)):
        assert (name in near) == times
        assert name in output


def test_a_neighborhood_printed(cli: Callable[..., Any], drawing_folder: Path) -> None:
    """The text format draws with characters; the default neighborhood is two hops."""
    output = cli("inspect", "digits_cnn.onnx", "--around", "stem/relu:0", "--hops", "1").stdout
    assert [line.split()[:3] for line in output.splitlines() if "float:" not in line] == [
        ["●", "Conv", "stem/conv"],
        ["◉", "Relu", "stem/relu"],
        ["●", "Conv", "depthwise/conv"],
    ]
    assert len(cli("inspect", "digits_cnn.onnx", "--around", "stem/relu").stdout) > len(output)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect", "MODEL", "--html", "there.html"], "there.html exists already."),
        (["plan", "MODEL", "--html", "there.html"], "there.html exists already."),
        (["insert", "MODEL", "--rules", "fixed_point", "--html", "there.html"], "there.html exists already."),
        (["inspect", "MODEL", "--force", "--html", "MODEL"], "MODEL is the source model"),
        (["insert", "MODEL", "--report", "a", "--html", "a"], "--html a is also another output."),
        (["inspect", "MODEL", "--html", "a.html", "-o", "a.html"], "--html a.html is also the file of -o."),
        (["plan", "MODEL", "--html", "a.html", "-o", "a.html"], "--html a.html is also the file of -o."),
        (
            ["inspect", "MODEL", "--around", "stem/rel"],
            "The drawing has nothing named 'stem/rel'. Did you mean 'stem/relu'",
        ),
        (["inspect", "MODEL", "--around", "x", "--format", "json"], "--format json lists the whole model."),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)
def test_refused_draw_options(cli: Callable[..., Any], drawing_folder: Path, arguments: list[str], said: str) -> None:
    """Invalid options are reported before any work is done."""
    Path("there.html").write_text("mine", "utf-8")
    Path("digits_cnn.onnx").rename("MODEL.onnx")
    call = ["MODEL.onnx" if argument == "MODEL" else argument for argument in arguments]
    assert escape_unprintable(said.replace("MODEL", "MODEL.onnx")) in cli(*call, code=2).stderr
    assert Path("there.html").read_text("utf-8") == "mine"
    assert not list(drawing_folder.glob("*quant*"))


def test_force_replaces(cli: Callable[..., Any], drawing_folder: Path) -> None:
    """With --force, the page replaces an existing file."""
    Path("there.html").write_text("mine", "utf-8")
    cli("inspect", "digits_cnn.onnx", "--html", "there.html", "--force")
    assert Path("there.html").read_text("utf-8").startswith("<!DOCTYPE html>")
