"""docs/json.md beside what the verbs write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import graphquant as gq

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]

COMMANDS = {
    "plan": ["plan digits_cnn.onnx", "plan digits_nested.onnx", "plan digits_cnn_bn.onnx --rules fixed_point"],
    "insert": [
        "insert digits_cnn.onnx --data digits_cnn_calib.npz -o OUT/again.onnx --report OUT/report.json",
        "insert digits_cnn_bn.onnx --rules weight_only -o OUT/folded.onnx --report OUT/report.json",
        "insert digits_nested.onnx --data digits_nested_calib.npz -o OUT/nested.onnx --report OUT/report.json",
        "insert digits_cnn.onnx --data digits_cnn_calib.npz --min-sqnr 60 -o OUT/b.onnx --report OUT/report.json",
        "insert digits_cnn.onnx --data digits_cnn_calib.npz --optimize latency -o OUT/l.onnx --report OUT/report.json",
        "insert digits_cnn.onnx --rules weight_only --size-budget 24% -o OUT/c.onnx --report OUT/report.json",
    ],
    "inspect": ["inspect OUT/quant.onnx", "inspect digits_rnn.pb"],
    "inspect --stats": ["inspect OUT/stats.gqs", "inspect digits_cnn.onnx --stats OUT/stats.gqs"],
    "explain": ["explain digits_cnn.onnx stem/conv", "explain OUT/quant.onnx *"],
    "check": ["check OUT/quant.onnx --for onnxruntime", "check OUT/quant.onnx --for tensorrt"],
    "compare": ["compare digits_cnn.onnx OUT/quant.onnx --data digits_cnn_eval.npz --samples 4"],
    "diff": ["diff digits_cnn.onnx OUT/quant.onnx"],
    "data check": ["data check digits_cnn.onnx digits_cnn_calib.npz"],
}
"""Commands that together write every kind of object; OUT has quant.onnx and stats.gqs."""

OPTIONAL = {
    "plan": {"schemes{}", "sites[]", "skips[]"},
    "insert": {"sites[]"},
    "inspect": {"quantization[]"},
    "check": {"ops[]"},
}
"""Objects with optional keys."""

NOT_WRITTEN = {
    "insert": {
        "changes[]",
        "conflicts[]",
        "ranges",
        "ranges.applied[]",
        "conversion",
        "conversion.tensors[]",
        "conversion.float_ops[]",
        "search.changed[]",
    },
    "inspect": {"function_clones[]", "tensors[]"},
    "data check": {"findings[]"},
    "check": {"findings[]"},
    "diff": {"changes[]"},
}
"""Objects that the sample models need not have."""

PARAMETERS = {"dtype", "scale", "zero_point", "axis", "block_size", "narrow", "low", "high"}

SHARED = [{"op", "port"}, {"op", "slot"}, PARAMETERS]
"""Keys of shared objects, without the graph."""

MAPS = {"graphs", "ops", "counts", "runs_as", "schemes"}
"""Objects whose keys are names."""

OPAQUE = {"steps[].undo", "schemes{}.observe", "schemes{}.args", "outputs[].accuracy"}
"""Objects that a row describes as a whole."""


@pytest.fixture
def out(samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a quantized model and statistics; the sample models are in the working directory."""
    data = str(samples / "digits_cnn_calib.npz")
    gq.insert(samples / "digits_cnn.onnx", data=data, samples=8).save(tmp_path / "quant.onnx")
    gq.calibrate(samples / "digits_cnn.onnx", data=data, samples=8).save(tmp_path / "stats.gqs")
    monkeypatch.chdir(samples)
    return tmp_path


def objects(data: Any, where: str = "") -> Iterator[tuple[str, set[str]]]:
    """Yield the path and the keys of each object, without shared objects."""
    if isinstance(data, list):
        for item in data:
            yield from objects(item, f"{where}[]")
    elif (
        isinstance(data, dict)
        and set(data) - {"graph"} not in SHARED
        and where not in OPAQUE | {"validation.comparison"}
    ):
        if where not in MAPS:
            yield where, set(data)
        for key, value in data.items():
            yield from objects(value, f"{where}{{}}" if where in MAPS else f"{where}.{key}".lstrip("."))


def documented() -> dict[str, dict[str, set[str]]]:
    """Return the documented keys by verb and path of the object."""
    found: dict[str, dict[str, set[str]]] = {}
    for section in (ROOT / "docs/json.md").read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        rows = re.findall(r"^\| (`[^`|]*`|all) \| (.*) \|$", text, re.MULTILINE)
        places = {
            place.strip("`") if place != "all" else "": set(re.findall(r"`([^`]+)`", keys)) for place, keys in rows
        }
        if places:
            found[title.strip("`")] = places
    return found


def written(out: Path, cli: Callable[..., Any], verb: str) -> dict[str, set[str]]:
    """Return the keys that the commands of a verb write, by path of the object."""
    found: dict[str, set[str]] = {}
    for command in COMMANDS[verb]:
        arguments = command.replace("OUT", str(out)).split()
        report = "--report" in arguments
        text = call(cli, [*arguments, *(["--force"] if report else ["--format", "json"])])
        data = json.loads((out / "report.json").read_text() if report else text)
        assert data["schema"] == 2
        for place, keys in objects(data):
            found[place] = found.get(place, set()) | keys
    return found


def call(cli: Callable[..., Any], arguments: list[str]) -> str:
    """Return the output of a command with exit code 0 or 1."""
    try:
        return str(cli(*arguments).stdout)
    except AssertionError:
        return str(cli(*arguments, code=1).stdout)


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_key_is_documented(verb: str, out: Path, cli: Callable[..., Any]) -> None:
    """docs/json.md has a row with exactly the keys of each written object."""
    said, found = documented()[verb], written(out, cli, verb)
    for place, keys in found.items():
        assert place in said
        assert keys <= said[place], place
        if place not in OPTIONAL.get(verb, ()):
            assert keys == said[place], place
    assert said.keys() - found.keys() <= NOT_WRITTEN.get(verb, set())


def test_every_verb_is_documented() -> None:
    """Every verb in docs/json.md is tested here."""
    assert documented().keys() == COMMANDS.keys()
