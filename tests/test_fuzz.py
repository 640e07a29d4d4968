"""Mutated models, data, rule files and plans cause success or GraphQuantError, in bounded time and memory.

Mutations run in a child process, which executes this file. So the parent reports crashes, hangs and memory errors
with the seed that caused them.
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

import graphquant as gq
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
from graphquant.visualize.graph_export import graph_graphml, graph_svg, graphviz_dot
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


def flip_bits(rng: random.Random, data: Bytes) -> Bytes:
    """Invert a few bits."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return changed


def truncate_bytes(rng: random.Random, data: Bytes) -> Bytes:
    """Cut off the end."""
    return data[: rng.randrange(len(data))]


def splice_bytes(rng: random.Random, data: Bytes) -> Bytes:
    """Delete, duplicate or replace a piece."""
    start, end = sorted(rng.randrange(len(data)) for _ in range(2))
    end = min(end, start + rng.choice((1, 8, 200, 5000)))
    source = rng.randrange(len(data))
    middle = rng.choice((b"", data[start:end] * 2, data[source : source + end - start]))
    return bytes(data[:start]) + bytes(middle) + bytes(data[end:])


# -- mutations of messages -------------------------------------------------------------------------

INTEGERS = (0, 1, -1, 2, 3, 7, 13, 127, 255, 1 << 16, (1 << 31) - 1, -(1 << 31), (1 << 63) - 1, -(1 << 63))
FLOATS = (0.0, -1.0, float("nan"), float("inf"), 1e38, 1e-45)
WORDS = ("", "a", "../x", "/etc/passwd", "\x00", "\u202e", "x" * 5000, "a/b:0", "^a", "a:1", "a:999999999999", "@in")


def mutate_message(rng: random.Random, message: Any, times: int) -> None:
    """Change random fields at any depth. Strings often become other strings of the message, which makes cycles."""
    set_fields = list(iterate_fields(message))
    strings = sorted({value for _, field, value in set_fields if isinstance(value, str)})
    for _ in range(times):
        holder, field, _ = rng.choice(set_fields)
        with contextlib.suppress(ValueError, TypeError):  # a value that the field cannot hold: no mutation
            change_field(rng, holder, field, strings)


def iterate_fields(message: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield each set field as message, descriptor and one of its values."""
    pending = [message]
    while pending:
        current = pending.pop()
        for field, value in current.ListFields():
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                yield current, field, None
                parts = (value[key] for key in sorted(value))  # a map's own order differs from run to run
                pending += [part for part in parts if isinstance(part, Message)]
            elif field.message_type is not None:
                yield current, field, None
                pending += value if hasattr(value, "extend") else [value]
            else:
                yield current, field, value[0] if hasattr(value, "extend") else value


def change_field(rng: random.Random, holder: Any, field: Any, strings: list[str]) -> None:
    """Clear a field, replace its value, or delete, duplicate or reorder its elements."""
    value = getattr(holder, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        keys = sorted(value)
        if keys:
            del value[rng.choice(keys)]
    elif hasattr(value, "extend"):
        index = rng.randrange(len(value))
        action = rng.randrange(4)
        if action == 0:
            del value[index]
        elif action == 1:
            value.extend([value[index]] * rng.choice((1, 3)))
        elif action == 2:  # the third action
            parts = list(value)
            rng.shuffle(parts)
            copies = [type(part).FromString(serialize(part)) if isinstance(part, Message) else part for part in parts]
            del value[:]
            value.extend(copies)
        elif field.message_type is None:
            value[index] = mutate_scalar(rng, value[index], strings)
    elif field.message_type is not None or rng.random() < 0.2:  # one in five
        holder.ClearField(field.name)
    else:
        setattr(holder, field.name, mutate_scalar(rng, value, strings))


def serialize(message: Any) -> bytes:
    """Return the message's bytes, with maps in the order of their keys."""
    return bytes(message.SerializeToString(deterministic=True))


def mutate_scalar(rng: random.Random, value: Any, strings: list[str]) -> Any:
    """Return another value of the same type."""
    if isinstance(value, str):
        return rng.choice(WORDS) if rng.random() < 0.3 else rng.choice(strings)  # three in ten
    if isinstance(value, bytes):
        return bytes(rng.choice((flip_bits, truncate_bytes, splice_bytes))(rng, value)) if value else b"\xff\x00"
    if isinstance(value, float):
        return rng.choice(FLOATS)
    if isinstance(value, bool):
        return not value
    return rng.choice(INTEGERS) if rng.random() < 0.7 else value + rng.choice((-1, 1))  # mostly


# -- mutated files ---------------------------------------------------------------------------------

BYTES: tuple[Callable[[random.Random, Bytes], Bytes], ...] = (flip_bits, truncate_bytes, splice_bytes)


def mutate_file_bytes(rng: random.Random, path: Path) -> None:
    """Mutate the bytes of a file."""
    path.write_bytes(rng.choice(BYTES)(rng, path.read_bytes()))


def mutate_file_message(rng: random.Random, path: Path, kind: Any) -> None:
    """Mutate the message in a file, which may be in text format."""
    message = kind()
    text = path.suffix == ".pbtxt"
    if text:
        proto.parse_text(path.read_text(), message)
    else:
        message.ParseFromString(path.read_bytes())
    mutate_message(rng, message, rng.choice((1, 1, 1, 2, 4, 16)))
    with contextlib.suppress(ValueError):  # text that is no UTF-8 cannot be serialized; the file stays as it was
        path.write_bytes(proto.to_text(message).encode() if text else serialize(message))


@cache
def quantized_sample(name: str) -> Path:
    """Return a sample model with quantize-dequantize ops, in a temporary folder."""
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    result = gq.insert(SAMPLES / name, rules=["fixed_point"], float_weights=name == "digits_rnn.onnx")
    return result.save(Path(folder.name) / name)


def write_mutated_model(rng: random.Random, folder: Path) -> Path:
    """Write a mutated sample model and return its path."""
    name = rng.choice((*ONNX, *ONNX, *GRAPHS, *FOLDERS))
    target = folder / name
    if rng.random() < 0.15:  # models that are quantized already have more to read
        name = rng.choice(("digits_cnn.onnx", "digits_rnn.onnx", "digits_cnn.pb"))
        target = folder / name
        shutil.copy(quantized_sample(name), target)
        mutate_file_message(rng, target, ModelProto if name in ONNX else proto.GraphDef)
        return target
    if name in FOLDERS:
        shutil.copytree(SAMPLES / name, target)
        part = rng.choice(("saved_model.pb",) * 4 + ("variables/variables.index",) * 2)
        part = "variables/variables.data-00000-of-00001" if rng.random() < 0.1 else part  # one in ten
        if part == "saved_model.pb" and rng.random() < 0.7:  # most
            mutate_file_message(rng, target / part, proto.SavedModel)
        else:
            mutate_file_bytes(rng, target / part)
        return target
    shutil.copy(SAMPLES / name, target)
    if rng.random() < 0.3:  # the rest are messages again, which get further
        mutate_file_bytes(rng, target)
    else:
        mutate_file_message(rng, target, ModelProto if name in ONNX else proto.GraphDef)
    return target


# -- cases -----------------------------------------------------------------------------------------


def model_case(rng: random.Random, folder: Path) -> str:
    """Inspect a mutated model, and quantize it by rules that need no data."""
    path = write_mutated_model(rng, folder)
    model = gq.load(path)
    inspect_model(model)
    rules = rng.choice(("fixed_point", "weight_only"))
    result = gq.insert(model, rules=[rules], float_weights=rng.random() < 0.2)  # one in five
    view_data.InsertResult.of(result).as_json()
    out = result.save(folder / f"out{path.suffix}")
    reloaded = gq.load(out)
    check_invariants(reloaded, "the fuzz test")
    assert path.suffix != ".onnx" or checker_error(path) or not checker_error(out), checker_error(out)
    added = len(summarize_model(reloaded).quantization_ops) - len(summarize_model(model).quantization_ops)
    expected = sum(len({use.graph for use in pair.site.uses}) for pair in result.inserted)  # a dequantization each
    assert added <= expected, f"{added} quantization ops came from {len(result.inserted)} sites in {expected} graphs"
    return "inserted" if result.inserted else "nothing to insert"


def checker_error(path: Path) -> str:
    """Return the error of onnx's checker, or "" if the model is valid."""
    try:
        checker.check_model(onnx.load(path))
    except (checker.ValidationError, ValueError, RuntimeError) as error:
        return str(error)
    return ""


def inspect_model(model: Model) -> None:
    """Create every view that `inspect` offers."""
    summary = summarize_model(model)
    json.dumps(view_data.InspectResult.model_validate(summary).as_json())
    graphviz_dot(model)
    drawing = model_drawing(model)
    viewer_page(viewer_data(drawing))
    graph_svg(drawing)
    graph_graphml(drawing)
    console = Console(file=io.StringIO(), width=80)
    console.print(view_text.summary_view(summary))


def data_case(rng: random.Random, folder: Path) -> str:
    """Calibrate a valid model on mutated data."""
    path = folder / "data.npz"
    shutil.copy(SAMPLES / "digits_cnn_calib.npz", path)
    mutate_file_bytes(rng, path)
    return (
        "inserted"
        if gq.insert(SAMPLES / "digits_cnn.onnx", data=str(path), samples=3, allow_empty=True).inserted
        else "nothing"
    )


def runtime_case(rng: random.Random, folder: Path) -> str:
    """Quantize a mutated ONNX model on random data, which runs it in ONNX Runtime."""
    path = folder / "model.onnx"
    shutil.copy(SAMPLES / rng.choice(ONNX), path)
    mutate_file_message(rng, path, ModelProto)
    result = gq.insert(path, data="random:1", allow_empty=True)
    out = result.save(folder / "out.onnx")
    if not result.inserted:
        return "nothing to insert"
    feed = next(iter(open_data("random:1", create_runner(result.source).inputs)))
    assert runtime_error(path, feed) or not runtime_error(out, feed), runtime_error(out, feed)
    return "inserted"


def runtime_error(path: Path, feed: Any) -> str:
    """Return the error of ONNX Runtime, or "" if the model runs."""
    try:
        create_runner(gq.load(path)).run(feed)
    except GraphQuantError as error:
        return str(error)
    return ""


def rules_case(rng: random.Random, folder: Path) -> str:
    """Quantize a valid model by a mutated rule file."""
    path = folder / "rules.toml"
    shutil.copy(SAMPLES.parent / "rules" / rng.choice(("fixed_point.toml", "onnxruntime.toml", "tflite.toml")), path)
    mutate_file_bytes(rng, path)
    model = SAMPLES / rng.choice(("digits_cnn.onnx", "digits_cnn.pb"))
    return f"{min(len(gq.plan(model, rules=[str(path)]).sites), 1)} or more sites"


def plan_case(rng: random.Random, folder: Path) -> str:
    """Apply a mutated plan to its model."""
    model = gq.load(SAMPLES / rng.choice(("digits_cnn_bn.onnx", "digits_rnn.onnx", "digits_rnn.pb")))
    data = plan_to_json(gq.plan(model, rules=["fixed_point"]))
    path = folder / "plan.json"
    if rng.random() < 0.3:  # the rest are JSON still
        path.write_bytes(rng.choice(BYTES)(rng, json.dumps(data).encode()))
    else:
        for _ in range(rng.choice((1, 1, 2, 5))):
            mutate_json(rng, data)
        path.write_text(json.dumps(data))
    result = gq.insert(model, plan=path)
    result.save(folder / f"out{Path(str(model.path)).suffix}")
    return "inserted" if result.inserted else "nothing to insert"


def mutate_json(rng: random.Random, data: Any) -> None:
    """Change one value anywhere in `data`."""
    values = list(json_values(data))
    holder, key = rng.choice(values)
    others = [other[index] for other, index in rng.sample(values, min(8, len(values)))]
    value = rng.choice((None, -1, 0, 10**30, 0.5, -2.5, "", "x", [], {}, True, [1e-9], [0.1, 0.2], *others))
    if rng.random() < 0.2:  # one in five
        del holder[key]
    else:
        holder[key] = json.loads(json.dumps(value))


def json_values(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield container and key of each value in `data`."""
    keys = list(data) if isinstance(data, dict) else list(range(len(data)))
    for key in keys:
        yield data, key
        if isinstance(data[key], dict | list):
            yield from json_values(data[key])


# The names seed the mutations: a new name changes what is tested.
CASES: dict[str, Callable[[random.Random, Path], str]] = {
    "model": model_case,
    "data": data_case,
    "ran": runtime_case,
    "rules": rules_case,
    "plan": plan_case,
}


# -- the child -------------------------------------------------------------------------------------


def run_seeds(kind: str, start: int, stop: int) -> None:
    """Run the seeds. Print each seed before it runs, and the outcomes as JSON at the end."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, _raise_timeout)
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    slowest = 0.0
    for seed in range(start, stop):
        sys.stderr.write(f"seed {seed}\n")
        sys.stderr.flush()
        start_time = time.monotonic()
        signal.alarm(SECONDS)
        with TemporaryDirectory() as folder:
            try:
                outcomes[CASES[kind](random.Random(f"{kind} {seed}"), Path(folder))] += 1  # noqa: S311  # not a secret
            except InternalError as error:
                failures.append(f"{kind} {seed}: {error}")
            except GraphQuantError as error:
                outcomes[type(error).__name__] += 1
            except BaseException:  # noqa: BLE001  # any other exception is a failure
                failures.append(f"{kind} {seed}: {traceback.format_exc()}")
            leftovers = [file.name for file in Path(folder).iterdir() if file.name.endswith((".part", ".tmp"))]
            failures += [f"{kind} {seed}: temporary files {leftovers}"] if leftovers else []
        signal.alarm(0)
        slowest = max(slowest, time.monotonic() - start_time)
    sys.stdout.write(json.dumps({"outcomes": outcomes, "failures": failures, "slowest": slowest}))


def _raise_timeout(signum: int, frame: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds")


def run_child(kind: str, start: int, stop: int) -> Counter[str]:
    """Run seeds in a child process, assert that none failed, and return the outcomes."""
    process = subprocess.run(
        [sys.executable, "-X", "faulthandler", __file__, kind, str(start), str(stop)],
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert process.returncode == 0, f"the child ended with {process.returncode}: {process.stderr[-3000:]}"
    report = json.loads(process.stdout)
    assert report["failures"] == [], "\n".join(report["failures"][:5])
    return Counter(report["outcomes"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"), [("model", 500), ("data", 150), ("ran", 250), ("rules", 200), ("plan", 250)]
)
def test_many_mutations(kind: str, count: int) -> None:
    """More than a thousand mutations cause only success and GraphQuantError, and both occur."""
    outcomes = run_child(kind, 1000, 1000 + count)
    assert sum(outcomes.values()) == count
    assert sum(number for name, number in outcomes.items() if name.endswith("Error")) > 0
    if kind != "data":
        assert sum(number for name, number in outcomes.items() if not name.endswith("Error")) > 0


if __name__ == "__main__":
    run_seeds(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
