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
        "badge",
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
        "viewer.query.value = viewer.asked.text = 'residual'; search(viewer); pick(viewer, 5)",
    ),
)
"""Name, model, colour scheme, link, and what is done there."""


def page(name: str, folder: Path) -> Path:
    """The page that `insert` makes of a sample model."""
    html = folder / f"{name}.html"
    command = [sys.executable, "-m", "graphquant", "insert", str(SAMPLES / f"{name}.onnx")]
    command += ["--data", str(SAMPLES / f"{name}_calib.npz"), "--dry-run", "--html", str(html), "--force"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return html


def taken(browser: Browser, html: Path, scheme: str, link: str, act: str) -> Image.Image:
    """A picture of a page at a link, after something was done there."""
    shown = browser.new_page(viewport={"width": 1280, "height": 720}, color_scheme=scheme)
    shown.goto(html.as_uri() + link)
    while not shown.evaluate("performance.getEntriesByName('drawn').length"):
        time.sleep(0.02)
    shown.evaluate(act)
    time.sleep(0.3)
    return Image.open(io.BytesIO(shown.screenshot()))


def main() -> None:
    """Takes all pictures, with few enough colours to be small."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as scratch:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        for name, model, scheme, link, act in PICTURES:
            picture = taken(browser, page(model, Path(scratch)), scheme, link, act)
            picture.convert("RGB").quantize(128).save(HERE / "images" / f"viewer_{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
