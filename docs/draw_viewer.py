"""Takes images/viewer_*.png: the viewer's pages of the sample models. Needs a Chromium and playwright."""

import io
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

HERE = Path(__file__).parent
SAMPLES = HERE.parent / "sample_models"

INSIDE = """
(() => {
  const inside = viewer.m.ops.graph.findIndex((graph, op) => graph && viewer.m.kind(op) === "matmul");
  select(viewer, { kind: "op", op: inside }, { move: true });
  zoom(viewer, 0.8);
})()
"""

PICTURES = (
    (
        "annotation",
        "digits_cnn",
        "light",
        "#op=residual%2Fadd",
        "document.querySelectorAll('#panel button.pill')[1].click()",
    ),
    ("nested", "digits_rnn", "dark", "", INSIDE),
    (
        "search",
        "digits_cnn",
        "light",
        "",
        "viewer.query.value = viewer.filters.text = 'residual'; search(viewer); goToMatch(viewer, 5)",
    ),
)
"""Name, model, color scheme, link, and what is done there."""

WORST = "goToEntry(viewer, 0)"

SCALE = "goToEntry(viewer, viewer.entries.findIndex((entry) => entry.suffix.includes('scale')))"

SIDES = (
    ("compare_light", "compare", "light", WORST),
    ("compare_dark", "compare", "dark", "colorBy(viewer, '1'); " + WORST),
    ("diff_light", "diff", "light", SCALE),
    ("diff_dark", "diff", "dark", "goToEntry(viewer, 0)"),
)
"""Name, page, color scheme, and what is done there."""


def page(name: str, folder: Path) -> Path:
    """The page that `insert` makes of a sample model."""
    html = folder / f"{name}.html"
    command = [sys.executable, "-m", "graphquant", "insert", str(SAMPLES / f"{name}.onnx")]
    command += ["--data", str(SAMPLES / f"{name}_calib.npz"), "--dry-run", "--html", str(html), "--force"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return html


def graphquant(*arguments: object) -> None:
    """Runs the program; diff ends with 1 where something differs."""
    command = [sys.executable, "-m", "graphquant", *map(str, arguments)]
    subprocess.run(command, check=arguments[0] != "diff", stdout=subprocess.DEVNULL)


def sides(folder: Path) -> dict[str, Path]:
    """The pages of a comparison in which one scale is ten times too small, and of a difference of three changes."""
    import numpy as np
    import onnx
    from onnx import numpy_helper

    source, quant, wrong, other = (
        SAMPLES / "digits_cnn.onnx",
        *(folder / f"{n}.onnx" for n in ("quant", "wrong", "other")),
    )
    graphquant("insert", source, "--data", SAMPLES / "digits_cnn_calib.npz", "-o", quant)
    model = onnx.load(quant)
    scale = next(node.input[1] for node in model.graph.node if node.input[0] == "pointwise/relu:0")
    held = next(one for one in model.graph.initializer if one.name == scale)
    held.CopyFrom(numpy_helper.from_array(np.float32(0.1) * numpy_helper.to_array(held), scale))
    onnx.save(model, wrong)
    for node in model.graph.node:
        node.op_type = "Elu" if node.name == "stem/relu" else node.op_type
        node.name = "depthwise/limit" if node.name == "depthwise/relu6" else node.name
    onnx.save(model, other)
    pages = {name: folder / f"{name}.html" for name in ("compare", "diff")}
    data = ("--data", SAMPLES / "digits_cnn_eval.npz")
    graphquant("compare", source, wrong, *data, "--html", pages["compare"])
    graphquant("diff", quant, other, "--html", pages["diff"])
    return pages


def taken(browser: Browser, html: Path, scheme: str, link: str, act: str) -> Image.Image:
    """A picture of a page at a link, after something was done there."""
    shown = browser.new_page(viewport={"width": 1280, "height": 720}, color_scheme=scheme)
    shown.goto(html.as_uri() + link)
    while not shown.evaluate("performance.getEntriesByName('drawn').length"):
        time.sleep(0.02)
    shown.evaluate(act)
    time.sleep(0.3)
    return Image.open(io.BytesIO(shown.screenshot()))


def saved(picture: Image.Image, name: str) -> None:
    """Writes a picture with few enough colors to be small."""
    picture.convert("RGB").quantize(128).save(HERE / "images" / f"viewer_{name}.png", optimize=True)


def main() -> None:
    """Takes all pictures, with few enough colors to be small."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as scratch:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        for name, model, scheme, link, act in PICTURES:
            picture = taken(browser, page(model, Path(scratch)), scheme, link, act)
            saved(picture, name)
        pages = sides(Path(scratch))
        for name, which, scheme, act in SIDES:
            saved(taken(browser, pages[which], scheme, "", act), name)
        browser.close()


if __name__ == "__main__":
    main()
