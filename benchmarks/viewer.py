"""Time to create, open and move about in the viewer's page, by the size of the model.

Run with `python benchmarks/viewer.py` (some minutes; needs a Chromium and playwright). Quantized residual nets and nets
of 25 towers, are drawn and opened in headless Chromium, which draws in software. Each figure is the median of three
runs; those of Python are processor time. First paint is counted from the start of the navigation until the frame after
the drawing. Moving is drawn for two seconds at three zooms, and the worst zoom is shown: frames per second by the
clock, which other work on the machine lowers, and the milliseconds of processor that the browser's processes took for
one frame.

With `--netron NETRON`, the program `netron` of an environment that has it, the same models are opened there too, in the
same browser. Its time counts from the start of the navigation until it shows the graph; it is asked once for each model
and given up after two minutes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from scale import residual

import graphquant as gq
from graphquant import formats
from graphquant.api.plan import prepare_for_plan
from graphquant.numerics import Range
from graphquant.observers import Sketch
from graphquant.quantize import solve_scales
from graphquant.quantize.rewrite import rewrite
from graphquant.visualize.drawing import model_drawing
from graphquant.visualize.layout import layered_layout
from graphquant.visualize.viewer_data import box_width, viewer_data
from graphquant.visualize.viewer_data import viewer_page as made_page

if TYPE_CHECKING:
    from graphquant.ir import Model
    from graphquant.visualize.drawing import Drawing

REPEATS, TOWERS = 3, 25
BARS = {"layout s": 1.0, "file MB": 5.0, "ms/frame": 1000 / 30}
FIRST_PAINT = {5_000: 0.5, 50_000: 2.0}
PATIENCE = 120
"""Seconds after which Netron is given up."""

MOVE = """
async (zoom) => {
  const app = window.viewer;
  app.view.k = zoom;
  app.view.x = app.canvas.clientWidth / 2 - (app.m.width / 2) * zoom;
  app.view.y = -app.s.height * zoom * 0.4;
  const start = performance.now();
  let frames = 0;
  while (performance.now() - start < 2000) {
    app.view.y -= 17;
    app.view.x += frames % 40 < 20 ? 5 : -5;
    app.redraw();
    await new Promise((done) => requestAnimationFrame(done));
    frames++;
  }
  return [frames, (performance.now() - start) / 1000];
}
"""


def wide(ops: int) -> onnx.ModelProto:
    """25 towers of Conv and Relu side by side that are summed with their neighbor now and then."""
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.normal(0, 0.3, (4, 4, 1, 1)).astype(np.float32), "w")
    nodes, here, made = [], ["x"] * TOWERS, 0
    while made < ops:
        for tower in range(TOWERS):
            name = f"tower_{tower}/block_{made // 500}/n{made}"
            nodes.append(helper.make_node("Conv", [here[tower], "w"], [f"c{made}"], name=f"{name}/conv"))
            nodes.append(helper.make_node("Relu", [f"c{made}"], [f"r{made}"], name=f"{name}/relu"))
            here[tower] = f"r{made}"
            made += 2
            if rng.random() < 0.3:  # noqa: PLR2004  # a share of them
                nodes.append(helper.make_node("Add", [here[tower], here[tower - 1]], [f"a{made}"], name=f"{name}/add"))
                here[tower] = f"a{made}"
                made += 1
    nodes.append(helper.make_node("Sum", here, ["y"], name="sum"))
    shape = [1, 4, 4, 4]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "wide", ends[:1], ends[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def quantized(source: onnx.ModelProto, folder: Path) -> Model:
    """The model with QDQ pairs, whose ranges are made up."""
    path = folder / "float.onnx"
    path.write_bytes(source.SerializeToString())
    model = formats.format_module("onnx").load(path)
    plan = gq.plan(model)
    prepared = prepare_for_plan(model, plan)
    seen = Range(np.float64(-1.0), np.float64(1.0))
    sketches = {site.tensor: Sketch(seen.low, seen.high, 1) for site in plan.sites}
    return rewrite(prepared, plan, solve_scales(prepared, plan, sketches).params)[0]


def layout_seconds(drawing: Drawing) -> float:
    """Seconds that placing takes."""
    widths, paths = [box_width(box) for box in drawing.boxes], drawing.group_paths()
    tensors = [(source, [drawing.wires[wire].target for wire in wires]) for source, _, wires in drawing.tensors()]
    started = time.process_time()
    layered_layout(widths, tensors, paths)
    return time.process_time() - started


def opened(browser: Any, path: Path) -> dict[str, float]:
    """Cost of one page in the browser."""
    page = browser.new_page(viewport={"width": 1300, "height": 820})
    page.goto(path.as_uri())
    while not page.evaluate("performance.getEntriesByName('drawn').length"):
        time.sleep(0.02)
    first = page.evaluate("performance.getEntriesByName('drawn')[0].startTime") / 1000
    session = browser.new_browser_cdp_session()
    rates, costs = [], []
    for zoom in (1.0, 0.2, 0.01):
        before = processor_seconds(session)
        frames, took = page.evaluate(MOVE, zoom)
        rates.append(frames / took)
        costs.append(1000 * (processor_seconds(session) - before) / frames)
    page.close()
    return {"first paint s": first, "frames/s": min(rates), "ms/frame": max(costs)}


def netron_seconds(program: str, model: Path) -> float | None:
    """Seconds until Netron shows a model; None if it does not in two minutes.

    That is asked in a process of its own, which can be ended with its browser: a page that is busy answers nothing.
    """
    command = [sys.executable, __file__, "--netron", program, "--open", str(model)]
    asked = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        return float(asked.communicate(timeout=PATIENCE)[0])
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(asked.pid, signal.SIGKILL)
        asked.wait()


def open_in_netron(browser: Any, program: str, model: Path) -> float:
    """The same, without an end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, str(model), "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    context = browser.new_context(viewport={"width": 1300, "height": 820})
    context.add_cookies([{"name": "consent", "value": "1", "url": f"http://127.0.0.1:{port}"}])
    try:
        for _ in range(100):  # until it answers
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        page = context.new_page()
        session = context.new_cdp_session(page)  # Netron takes `eval` away, which the ordinary way needs
        started = time.monotonic()
        page.goto(f"http://127.0.0.1:{port}", wait_until="commit")
        drawn = {"expression": "document.body?.classList.contains('default')"}
        while session.send("Runtime.evaluate", drawn)["result"].get("value") is not True:
            time.sleep(0.05)
        return time.monotonic() - started
    finally:
        context.close()
        server.terminate()
        server.wait()


def processor_seconds(session: Any) -> float:
    """Return the cost of all processes of the browser so far."""
    return sum(one["cpuTime"] for one in session.send("SystemInfo.getProcessInfo")["processInfo"])


def measured(browser: Any, model: Model, folder: Path) -> dict[str, float]:
    """All figures of one model, medians."""
    drawing = model_drawing(model)
    rows = []
    for _ in range(REPEATS):
        laid = layout_seconds(drawing)
        started = time.process_time()
        text = made_page(viewer_data(drawing))
        took = time.process_time() - started
        path = folder / "page.html"
        path.write_text(text, "utf-8")
        sizes = {"ops": len(drawing.boxes), "layout s": laid, "page s": took, "file MB": len(text) / 1e6}
        rows.append({**sizes, **opened(browser, path)})
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    """Prints a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="5,000 ops only")
    parser.add_argument("--netron", metavar="NETRON", help="the program of Netron, to measure that too")
    parser.add_argument("--open", metavar="MODEL", help="open only this model, in Netron, and print the seconds")
    asked = parser.parse_args()
    sizes = (5_000,) if asked.quick else (5_000, 50_000)
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    misses = []
    netron = " Netron s |" if asked.netron else ""
    if not asked.open:
        print(f"| model | ops | layout s | page s | file MB | first paint s | frames/s | ms/frame |{netron}")
        print("|---|--:|--:|--:|--:|--:|--:|--:|" + ("--:|" if netron else ""))
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as scratch:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        if asked.open:
            print(open_in_netron(browser, asked.netron, Path(asked.open)))
            return
        for build in (residual, wide):
            for ops in sizes:
                model = quantized(build(ops), Path(scratch))
                row = measured(browser, model, Path(scratch))
                cells = [f"{row['ops']:,.0f}", *(f"{row[name]:.2f}" for name in list(row)[1:])]
                if asked.netron:
                    path = Path(scratch) / "quantized.onnx"
                    gq.save(model, path, force=True)
                    took = netron_seconds(asked.netron, path)
                    cells.append(f"more than {PATIENCE}" if took is None else f"{took:.1f}")
                print(f"| {build.__name__} | {' | '.join(cells)} |", flush=True)
                if row["first paint s"] > FIRST_PAINT[ops] or any(row[name] > bar for name, bar in BARS.items()):
                    misses.append(f"{build.__name__} {ops}")
        browser.close()
    print(f"\nMissed: {', '.join(misses)}" if misses else "\nAll bars are met.")


if __name__ == "__main__":
    main()
