"""docs/json.md and results.schema.json against the JSON that the commands write."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator
from support.cli import command_output
from support.json_schemas import results_schema
from support.rule_files import input_rule, weight_rule

import graphquant as gq
from graphquant.quantize import SkipCode
from graphquant.visualize.json_export import RESULTS, InsertResult

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
        (
            "insert digits_cnn.onnx --data digits_cnn_calib.npz --optimize latency --allow-empty -o OUT/l.onnx"
            " --report OUT/report.json"
        ),
        (
            "insert digits_cnn.onnx --data digits_cnn_calib.npz --rules qnn --io int8 -o OUT/io.onnx"
            " --report OUT/report.json"
        ),
        "insert digits_cnn.onnx --rules weight_only --size-budget 24% -o OUT/c.onnx --report OUT/report.json",
        (
            "insert digits_cnn.onnx --data digits_cnn_calib.npz --rules OUT/four_bits.toml -o OUT/repaired.onnx"
            " --report OUT/report.json"
        ),
    ],
    "inspect": ["inspect OUT/quant.onnx", "inspect digits_rnn.pb"],
    "inspect --stats": ["inspect OUT/stats.gqs", "inspect digits_cnn.onnx --stats OUT/stats.gqs"],
    "explain": ["explain digits_cnn.onnx stem/conv", "explain OUT/quant.onnx *"],
    "check": ["check OUT/quant.onnx --for onnxruntime", "check OUT/quant.onnx --for tensorrt"],
    "compare": ["compare digits_cnn.onnx OUT/quant.onnx --data digits_cnn_eval.npz --samples 8"],
    "diff": ["diff digits_cnn.onnx OUT/quant.onnx"],
    "data check": ["data check digits_cnn.onnx digits_cnn_calib.npz"],
}
"""Commands that together write every kind of object; OUT has quant.onnx and stats.gqs."""

KINDS = "conv|depthwise_conv|matmul|gemm"
FOUR_BITS = f"""
[scheme.weight]
bits = 4
zero = "symmetric"
observe = "absmax"
[scheme.activation]
bits = 4
signed = false
observe = "minmax"
{weight_rule(KINDS)}
{input_rule(KINDS)}
"""
"""Rules whose plan misses the default target, so that it is repaired."""

OPTIONAL = {
    "plan": {"schemes{}", "sites[]", "skips[]"},
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
        "search.repair",  # `tests/optimize/test_repair.py` compares its keys
        "search.repair.steps[]",
    },
    "inspect": {"function_clones[]", "io[]", "tensors[]"},
    "data check": {"findings[]"},
    "compare": {"metric"},
    "check": {"findings[]"},
    "diff": {"changes[]"},
}
"""Objects that the sample models need not have."""

SCHEMA = ROOT / "graphquant/visualize/results.schema.json"

PARAMETERS = {"dtype", "scale", "zero_point", "axis", "block_size", "narrow", "low", "high", "dynamic"}

SHARED = [{"op", "port"}, {"op", "slot"}, PARAMETERS]
"""Keys of shared objects, without the graph."""

MAPS = {"graphs", "ops", "counts", "runs_as", "schemes"}
"""Objects whose keys are names."""

OPAQUE = {"steps[].undo", "schemes{}.observe", "schemes{}.args", "outputs[].accuracy"}
"""Objects that a row describes as a whole."""


@pytest.fixture(scope="module")
def command_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a quantized model, statistics and rules."""
    folder, samples = tmp_path_factory.mktemp("inputs"), ROOT / "sample_models"
    data = str(samples / "digits_cnn_calib.npz")
    gq.insert(samples / "digits_cnn.onnx", data=data, samples=8).save(folder / "quant.onnx")
    gq.calibrate(samples / "digits_cnn.onnx", data=data, samples=8).save(folder / "stats.gqs")
    (folder / "four_bits.toml").write_text(FOUR_BITS, "utf-8")
    return folder


@pytest.fixture
def results_folder(command_inputs: Path, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder; the sample models are in the working directory."""
    monkeypatch.chdir(samples)
    return shutil.copytree(command_inputs, tmp_path, dirs_exist_ok=True)


def objects(data: Any, path: str = "") -> Iterator[tuple[str, set[str]]]:
    """Yield the path and the keys of each object, without shared objects."""
    if isinstance(data, list):
        for item in data:
            yield from objects(item, f"{path}[]")
    elif (
        isinstance(data, dict)
        and set(data) - {"graph"} not in SHARED
        and path not in OPAQUE | {"validation.comparison"}
    ):
        if path not in MAPS:
            yield path, set(data)
        for key, value in data.items():
            yield from objects(value, f"{path}{{}}" if path in MAPS else f"{path}.{key}".lstrip("."))


def documented_keys() -> dict[str, dict[str, set[str]]]:
    """Return the documented keys by verb and path of the object."""
    verbs: dict[str, dict[str, set[str]]] = {}
    for section in (ROOT / "docs/json.md").read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        rows = re.findall(r"^\| (`[^`|]*`|all) \| (.*) \|$", text, re.MULTILINE)
        rows_by_path = {
            path.strip("`") if path != "all" else "": set(re.findall(r"`([^`]+)`", keys)) for path, keys in rows
        }
        if rows_by_path:
            verbs[title.strip("`")] = rows_by_path
    return verbs


def written_keys(out: Path, cli: Callable[..., Any], verb: str) -> dict[str, set[str]]:
    """Return the keys that the commands of a verb write, by path of the object."""
    keys_by_path: dict[str, set[str]] = {}
    for command in COMMANDS[verb]:
        arguments = command.replace("OUT", str(out)).split()
        report = "--report" in arguments
        text = command_output(*arguments, *(["--force"] if report else ["--format", "json"]))
        data = json.loads((out / "report.json").read_text() if report else text)
        assert data["schema"] == 2
        if verb in RESULTS:
            Draft202012Validator(schema_of(verb)).validate(data)
        for path, keys in objects(data):
            keys_by_path[path] = keys_by_path.get(path, set()) | keys
    return keys_by_path


def schema_of(verb: str) -> dict[str, Any]:
    """Return the shipped schema of a verb's result, in which unknown keys are mistakes."""
    schema = json.loads(SCHEMA.read_text("utf-8"))
    for definition in schema["$defs"].values():
        definition["additionalProperties"] = False
    return {**schema, "$ref": f"#/$defs/{RESULTS[verb].__name__}"}


@pytest.mark.slow
@pytest.mark.parametrize("verb", COMMANDS)
def test_every_key_is_documented(verb: str, results_folder: Path, cli: Callable[..., Any]) -> None:
    """docs/json.md has a row with exactly the keys of each written object."""
    documented, written = documented_keys()[verb], written_keys(results_folder, cli, verb)
    for path, keys in written.items():
        assert path in documented
        assert keys <= documented[path], path
        if path not in OPTIONAL.get(verb, ()):
            assert keys == documented[path], path
    assert documented.keys() - written.keys() <= NOT_WRITTEN.get(verb, set())


def test_every_verb_is_documented() -> None:
    """Every verb in docs/json.md is tested here, and has a schema except for plan, whose file is an input."""
    assert documented_keys().keys() == COMMANDS.keys() == {"plan", *RESULTS}


def test_shipped_schema_is_up_to_date() -> None:
    """The shipped schema equals that of the models. `python tests/visualize/write_schema.py` updates it."""
    assert json.loads(SCHEMA.read_text("utf-8")) == results_schema()


def test_codes_of_skips(samples: Path) -> None:
    """The report of `insert` has the code of each skip, and docs/json.md describes all codes."""
    model = gq.load(samples / "digits_cnn.onnx")
    result = gq.insert(model, rules="fixed_point", exclude=["stem/relu:0"])
    codes = [skip["code"] for skip in InsertResult.of(result).as_json()["skips"]]
    assert codes == [skip.code for skip in result.skips]
    assert SkipCode.SELECTION in codes
    section = (ROOT / "docs/json.md").read_text().split("### Codes of skips")[1].partition("\n## ")[0]
    assert re.findall(r"^\| ([a-z]+) \| ", section, re.MULTILINE)[1:] == [*SkipCode]
