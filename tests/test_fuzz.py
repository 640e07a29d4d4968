"""Mutated models, data, rule files and plans end in success or in a GraphQuantError, in bounded time and memory.

The mutations run in a child process of their own (this very file), so that a crash of a library written in C++, a hang
or a lack of memory is seen, with the seed that caused it.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import onnx
import pytest
from google.protobuf.message import Message
from onnx import ModelProto, checker
from rich.console import Console

from graphquant import api
from graphquant.analysis.model_summary import summarize_model
from graphquant.calibration.data import open_data
from graphquant.errors import GraphQuantError, InternalError
from graphquant.formats.onnx import create_runner
from graphquant.formats.tensorflow import proto
from graphquant.ir import Model, check_invariants
from graphquant.quantize import plan_to_json
from graphquant.visualize import json_export as view_data
from graphquant.visualize import text as view_text
from graphquant.visualize.drawing import model_drawing
from graphquant.visualize.graph_export import graph_graphml, graphviz_dot
from graphquant.visualize.svg import graph_svg
from graphquant.visualize.viewer_data import viewer_data, viewer_page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SAMPLES = Path(__file__).parents[1] / "sample_models"
ONNX = ("digits_cnn.onnx", "digits_cnn_bn.onnx", "digits_rnn.onnx")
GRAPHS = ("digits_cnn.pb", "digits_cnn.pbtxt", "digits_rnn.pb")
FOLDERS = ("digits_cnn_saved_model", "digits_rnn_saved_model")

MEMORY = 6 << 30
"""Bytes of address space a child may have."""

SECONDS = 30
"""Longest time one mutation may take; the usual one is a few hundredths of a second."""

Bytes = bytes | bytearray


# -- mutations of bytes ----------------------------------------------------------------------------


def flip(rng: random.Random, data: Bytes) -> Bytes:
    """A few bits inverted."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return changed


def truncate(rng: random.Random, data: Bytes) -> Bytes:
    """The end cut off."""
    return data[: rng.randrange(len(data))]


def splice(rng: random.Random, data: Bytes) -> Bytes:
    """A piece deleted, doubled, or put where another was."""
    start, end = sorted(rng.randrange(len(data)) for _ in range(2))
    end = min(end, start + rng.choice((1, 8, 200, 5000)))
    where = rng.randrange(len(data))
    middle = rng.choice((b"", data[start:end] * 2, data[where : where + end - start]))
    return bytes(data[:start]) + bytes(middle) + bytes(data[end:])


# -- mutations of messages -------------------------------------------------------------------------

INTEGERS = (0, 1, -1, 2, 3, 7, 13, 127, 255, 1 << 16, (1 << 31) - 1, -(1 << 31), (1 << 63) - 1, -(1 << 63))
FLOATS = (0.0, -1.0, float("nan"), float("inf"), 1e38, 1e-45)
WORDS = ("", "a", "../x", "/etc/passwd", "\x00", "\u202e", "x" * 5000, "a/b:0", "^a", "a:1", "a:999999999999", "@in")


def mutate(rng: random.Random, message: Any, times: int) -> None:
    """Changes random fields, at any depth; strings often become other strings of the message, which makes cycles."""
    places = list(fields(message))
    strings = sorted({value for _, field, value in places if isinstance(value, str)})
    for _ in range(times):
        holder, field, _ = rng.choice(places)
        with contextlib.suppress(ValueError, TypeError):  # a value that the field cannot hold: no mutation
            change(rng, holder, field, strings)


def fields(message: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield each field that is set, as message, descriptor and value or one value of it."""
    todo = [message]
    while todo:
        here = todo.pop()
        for field, value in here.ListFields():
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                yield here, field, None
                parts = (value[key] for key in sorted(value))  # a map's own order differs from run to run
                todo += [part for part in parts if isinstance(part, Message)]
            elif field.message_type is not None:
                yield here, field, None
                todo += value if field.is_repeated else [value]
            else:
                yield here, field, value[0] if field.is_repeated else value


def change(rng: random.Random, holder: Any, field: Any, strings: list[str]) -> None:
    """Changes one field: to nothing, to other values, or its parts to fewer, more or another order."""
    value = getattr(holder, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        keys = sorted(value)
        if keys:
            del value[rng.choice(keys)]
    elif field.is_repeated:
        index = rng.randrange(len(value))
        action = rng.randrange(4)
        if action == 0:
            del value[index]
        elif action == 1:
            value.extend([value[index]] * rng.choice((1, 3)))
        elif action == 2:  # the third action
            parts = list(value)
            rng.shuffle(parts)
            copies = [type(part).FromString(wire(part)) if isinstance(part, Message) else part for part in parts]
            del value[:]
            value.extend(copies)
        elif field.message_type is None:
            value[index] = scalar(rng, value[index], strings)
    elif field.message_type is not None or rng.random() < 0.2:  # one in five
        holder.ClearField(field.name)
    else:
        setattr(holder, field.name, scalar(rng, value, strings))


def wire(message: Any) -> bytes:
    """The message's bytes, maps in the order of their keys."""
    return bytes(message.SerializeToString(deterministic=True))


def scalar(rng: random.Random, value: Any, strings: list[str]) -> Any:
    """Another value of the same type."""
    if isinstance(value, str):
        return rng.choice(WORDS) if rng.random() < 0.3 else rng.choice(strings)  # three in ten
    if isinstance(value, bytes):
        return bytes(rng.choice((flip, truncate, splice))(rng, value)) if value else b"\xff\x00"
    if isinstance(value, float):
        return rng.choice(FLOATS)
    if isinstance(value, bool):
        return not value
    return rng.choice(INTEGERS) if rng.random() < 0.7 else value + rng.choice((-1, 1))  # mostly


# -- mutated files ---------------------------------------------------------------------------------

BYTES: tuple[Callable[[random.Random, Bytes], Bytes], ...] = (flip, truncate, splice)


def mutated_bytes(rng: random.Random, path: Path) -> None:
    """Spoils the bytes of a file."""
    path.write_bytes(rng.choice(BYTES)(rng, path.read_bytes()))


def mutated_message(rng: random.Random, path: Path, kind: Any) -> None:
    """Spoils the message in a file, in text form if the file is."""
    message = kind()
    text = path.suffix == ".pbtxt"
    if text:
        proto.parse_text(path.read_text(), message)
    else:
        message.ParseFromString(path.read_bytes())
    mutate(rng, message, rng.choice((1, 1, 1, 2, 4, 16)))
    with contextlib.suppress(ValueError):  # text that is no UTF-8 cannot be serialized; the file stays as it was
        path.write_bytes(proto.to_text(message).encode() if text else wire(message))


@cache
def quantized(name: str) -> Path:
    """The sample model with quantize-dequantize ops, in a folder of this process."""
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    result = api.insert(SAMPLES / name, rules=["fixed_point"], float_weights=name == "digits_rnn.onnx")
    return result.save(Path(folder.name) / name)


def mutated_model(rng: random.Random, folder: Path) -> Path:
    """A sample model, spoilt."""
    name = rng.choice((*ONNX, *ONNX, *GRAPHS, *FOLDERS))
    target = folder / name
    if rng.random() < 0.15:  # models that are quantized already have more to read
        name = rng.choice(("digits_cnn.onnx", "digits_rnn.onnx", "digits_cnn.pb"))
        target = folder / name
        shutil.copy(quantized(name), target)
        mutated_message(rng, target, ModelProto if name in ONNX else proto.GraphDef)
        return target
    if name in FOLDERS:
        shutil.copytree(SAMPLES / name, target)
        part = rng.choice(("saved_model.pb",) * 4 + ("variables/variables.index",) * 2)
        part = "variables/variables.data-00000-of-00001" if rng.random() < 0.1 else part  # one in ten
        if part == "saved_model.pb" and rng.random() < 0.7:  # most
            mutated_message(rng, target / part, proto.SavedModel)
        else:
            mutated_bytes(rng, target / part)
        return target
    shutil.copy(SAMPLES / name, target)
    if rng.random() < 0.3:  # the rest are messages again, which get further
        mutated_bytes(rng, target)
    else:
        mutated_message(rng, target, ModelProto if name in ONNX else proto.GraphDef)
    return target


# -- what is tried ---------------------------------------------------------------------------------


def model_case(rng: random.Random, folder: Path) -> str:
    """A spoilt model is inspected, and quantized where no data is needed."""
    path = mutated_model(rng, folder)
    model = api.load(path)
    look(model)
    rules = rng.choice(("fixed_point", "weight_only"))
    result = api.insert(model, rules=[rules], float_weights=rng.random() < 0.2)  # one in five
    view_data.result_json(result, None)
    out = result.save(folder / f"out{path.suffix}")
    again = api.load(out)
    check_invariants(again, "the fuzz test")
    assert path.suffix != ".onnx" or complaint(path) or not complaint(out), complaint(out)
    added = len(summarize_model(again).quantization_ops) - len(summarize_model(model).quantization_ops)
    made = sum(len({use.graph for use in done.site.uses}) for done in result.inserted)  # a dequantization each
    assert added <= made, f"{added} quantization ops came from {len(result.inserted)} sites in {made} graphs"
    return "inserted" if result.inserted else "nothing to insert"


def complaint(path: Path) -> str:
    """What onnx's checker has against the model; "" if nothing."""
    try:
        checker.check_model(onnx.load(path))
    except (checker.ValidationError, ValueError, RuntimeError) as error:
        return str(error)
    return ""


def look(model: Model) -> None:
    """Everything that `inspect` shows."""
    found = summarize_model(model)
    json.dumps(view_data.summary_json(found))
    graphviz_dot(model)
    drawing = model_drawing(model)
    viewer_page(viewer_data(drawing))
    graph_svg(drawing)
    graph_graphml(drawing)
    console = Console(file=io.StringIO(), width=80)
    console.print(view_text.summary_view(found))


def data_case(rng: random.Random, folder: Path) -> str:
    """A sound model is calibrated on a spoilt file."""
    path = folder / "data.npz"
    shutil.copy(SAMPLES / "digits_cnn_calib.npz", path)
    mutated_bytes(rng, path)
    return "inserted" if api.insert(SAMPLES / "digits_cnn.onnx", data=str(path), samples=3).inserted else "nothing"


def ran_case(rng: random.Random, folder: Path) -> str:
    """A spoilt ONNX model runs on random data: onnxruntime gets to see it."""
    path = folder / "model.onnx"
    shutil.copy(SAMPLES / rng.choice(ONNX), path)
    mutated_message(rng, path, ModelProto)
    result = api.insert(path, data="random:1")
    out = result.save(folder / "out.onnx")
    if not result.inserted:
        return "nothing to insert"
    feed = next(iter(open_data("random:1", create_runner(result.source).inputs)))
    assert refusal(path, feed) or not refusal(out, feed), refusal(out, feed)
    return "inserted"


def refusal(path: Path, feed: Any) -> str:
    """Why onnxruntime does not run the model; "" if it does."""
    try:
        create_runner(api.load(path)).run(feed)
    except GraphQuantError as error:
        return str(error)
    return ""


def rules_case(rng: random.Random, folder: Path) -> str:
    """A sound model is quantized by a spoilt rule file."""
    path = folder / "rules.toml"
    shutil.copy(SAMPLES.parent / "rules" / rng.choice(("fixed_point.toml", "onnxruntime.toml", "tflite.toml")), path)
    mutated_bytes(rng, path)
    model = SAMPLES / rng.choice(("digits_cnn.onnx", "digits_cnn.pb"))
    return f"{min(len(api.plan(model, rules=[str(path)]).sites), 1)} or more sites"


def plan_case(rng: random.Random, folder: Path) -> str:
    """A spoilt plan is applied to its model."""
    model = api.load(SAMPLES / rng.choice(("digits_cnn_bn.onnx", "digits_rnn.onnx", "digits_rnn.pb")))
    data = plan_to_json(api.plan(model, rules=["fixed_point"]))
    path = folder / "plan.json"
    if rng.random() < 0.3:  # the rest are JSON still
        path.write_bytes(rng.choice(BYTES)(rng, json.dumps(data).encode()))
    else:
        for _ in range(rng.choice((1, 1, 2, 5))):
            mutate_json(rng, data)
        path.write_text(json.dumps(data))
    result = api.insert(model, plan=path)
    result.save(folder / f"out{Path(str(model.path)).suffix}")
    return "inserted" if result.inserted else "nothing to insert"


def mutate_json(rng: random.Random, data: Any) -> None:
    """Changes one value anywhere in `data`."""
    places = list(json_places(data))
    holder, key = rng.choice(places)
    others = [other[where] for other, where in rng.sample(places, min(8, len(places)))]
    value = rng.choice((None, -1, 0, 10**30, 0.5, -2.5, "", "x", [], {}, True, [1e-9], [0.1, 0.2], *others))
    if rng.random() < 0.2:  # one in five
        del holder[key]
    else:
        holder[key] = json.loads(json.dumps(value))


def json_places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each value in `data` as what holds it and its key."""
    keys = list(data) if isinstance(data, dict) else list(range(len(data)))
    for key in keys:
        yield data, key
        if isinstance(data[key], dict | list):
            yield from json_places(data[key])


CASES: dict[str, Callable[[random.Random, Path], str]] = {
    "model": model_case,
    "data": data_case,
    "ran": ran_case,
    "rules": rules_case,
    "plan": plan_case,
}


# -- the child -------------------------------------------------------------------------------------


def child(kind: str, start: int, stop: int) -> None:
    """Tries the seeds; prints each before it is tried, and the endings as JSON at the end."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, _late)
    endings: Counter[str] = Counter()
    bad: list[str] = []
    slowest = 0.0
    for seed in range(start, stop):
        sys.stderr.write(f"seed {seed}\n")
        sys.stderr.flush()
        began = time.monotonic()
        signal.alarm(SECONDS)
        with TemporaryDirectory() as folder:
            try:
                endings[CASES[kind](random.Random(f"{kind} {seed}"), Path(folder))] += 1  # noqa: S311  # not a secret
            except InternalError as error:
                bad.append(f"{kind} {seed}: {error}")
            except GraphQuantError as error:
                endings[type(error).__name__] += 1
            except BaseException:  # noqa: BLE001  # what the test is about
                bad.append(f"{kind} {seed}: {traceback.format_exc()}")
            left = [file.name for file in Path(folder).iterdir() if file.name.endswith((".part", ".tmp"))]
            bad += [f"{kind} {seed}: left {left}"] if left else []
        signal.alarm(0)
        slowest = max(slowest, time.monotonic() - began)
    sys.stdout.write(json.dumps({"endings": endings, "bad": bad, "slowest": slowest}))


def _late(signum: int, frame: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds")


def attempt(kind: str, start: int, stop: int) -> Counter[str]:
    """The endings of these seeds; a failure names the seed."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", __file__, kind, str(start), str(stop)],
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, f"the child ended with {done.returncode}: {done.stderr[-3000:]}"
    found = json.loads(done.stdout)
    assert found["bad"] == [], "\n".join(found["bad"][:5])
    return Counter(found["endings"])


@pytest.mark.parametrize(("kind", "count"), [("model", 200), ("data", 25), ("ran", 25), ("rules", 25), ("plan", 25)])
def test_some_mutations_end_well(kind: str, count: int) -> None:
    """Nothing but success and GraphQuantErrors, and both of them happen."""
    endings = attempt(kind, 0, count)
    assert sum(endings.values()) == count
    assert sum(number for name, number in endings.items() if name.endswith("Error")) > 0
    if kind != "data":
        assert sum(number for name, number in endings.items() if not name.endswith("Error")) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "start", "stop"),
    [
        *(("model", start, start + 500) for start in range(1000, 4000, 500)),
        ("data", 1000, 1300),
        ("ran", 1000, 1500),
        ("rules", 1000, 1400),
        ("plan", 1000, 1500),
    ],
)
def test_thousands_of_mutations_end_well(kind: str, start: int, stop: int) -> None:
    """Nothing but success and GraphQuantErrors."""
    assert sum(attempt(kind, start, stop).values()) == stop - start


if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
