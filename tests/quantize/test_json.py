"""Plans as JSON: there and back, and every mistake of an edited one named at once."""

import copy
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphquant.errors import UsageError
from graphquant.ir import TensorRef, Use
from graphquant.quantize import Plan, Site, Skip, Step, plan_from_json, plan_to_json, read_plan
from graphquant.rules import ObserverConfig, Scheme

WEIGHT = Scheme(
    name="weight", dtype="int8", narrow=True, per="channel", observe=ObserverConfig(name="absmax"), family="onnx-qdq"
)
UNIT = Scheme(
    name="unit",
    bits=8,
    signed=False,
    zero="asymmetric",
    observe=ObserverConfig(name="fixed", low=0.0, high=1.0),
    family="onnx-qdq",
)
PLAN = Plan(
    format="onnx",
    model="aa",
    prepared="bb",
    rules=("onnxruntime",),
    steps=(Step(step="fold-batchnorm", target="bn", detail="folded into conv", undo={"weight": "w:0"}),),
    sites=(
        Site(
            tensor=TensorRef("", "w"),
            uses=(Use("", "conv", 1),),
            graph="",
            scheme=WEIGHT,
            axis=0,
            rule="weight",
            why="kernels",
            parameter=True,
        ),
        Site(
            tensor=TensorRef("", "s", 1),
            uses=(Use("", "mul", 1), Use("body", "add", 0)),
            graph="",
            scheme=UNIT,
            rule="unit",
            range=(0.0, 2.0),
        ),
        Site(
            tensor=TensorRef("", "t"),
            uses=(Use("body", "neg", 0),),
            graph="body",
            scheme=replace(UNIT, name="weight"),
            tie=(Use("", "t", 0),),
            scale=(0.5,),
            zero_point=(3,),
        ),
    ),
    skips=(
        Skip(tensor=TensorRef("body", "a"), uses=(Use("body", "b", 0),), rule="r", reason="it is quantized already"),
    ),
    unused=("pool",),
)

GOLDEN = """\
{
 "schema": 2,
 "format": "onnx",
 "model": "aa",
 "prepared": "bb",
 "rules": ["onnxruntime"], "targets": [],
 "digest": "",
 "steps": [{"step": "fold-batchnorm", "target": "bn", "detail": "folded into conv", "why": "",
  "undo": {"weight": "w:0"}}],
 "schemes": {
  "weight": {"dtype": "int8", "narrow": true, "per": "channel", "observe": "absmax", "family": "onnx-qdq"},
  "unit": {
   "bits": 8, "signed": false, "zero": "asymmetric",
   "observe": {"name": "fixed", "low": 0.0, "high": 1.0}, "family": "onnx-qdq"
  },
  "weight_2": {
   "name": "weight", "bits": 8, "signed": false, "zero": "asymmetric",
   "observe": {"name": "fixed", "low": 0.0, "high": 1.0}, "family": "onnx-qdq"
  }
 },
 "sites": [
  {
   "tensor": {"op": "w", "port": 0}, "uses": [{"op": "conv", "slot": 1}],
   "scheme": "weight", "rule": "weight", "why": "kernels", "parameter": true, "axis": 0
  },
  {
   "tensor": {"op": "s", "port": 1}, "uses": [{"op": "mul", "slot": 1}, {"graph": "body", "op": "add", "slot": 0}],
   "scheme": "unit", "rule": "unit", "why": "", "parameter": false, "range": [0.0, 2.0]
  },
  {
   "tensor": {"op": "t", "port": 0}, "uses": [{"graph": "body", "op": "neg", "slot": 0}], "graph": "body",
   "scheme": "weight_2", "rule": "", "why": "", "parameter": false, "tie": [{"op": "t", "slot": 0}],
   "scale": [0.5], "zero_point": [3]
  }
 ],
 "skips": [
  {
   "tensor": {"graph": "body", "op": "a", "port": 0}, "uses": [{"graph": "body", "op": "b", "slot": 0}],
   "rule": "r", "reason": "it is quantized already", "code": "rule"
  }
 ],
 "unused": ["pool"],
 "algorithms": []
}
"""  # fmt: skip


def plain():
    """The JSON data of the plan, to be edited."""
    return json.loads(json.dumps(plan_to_json(PLAN)))


def test_golden():
    """The JSON of a plan is what a person reads and edits, key by key in this order."""
    assert json.dumps(plan_to_json(PLAN)) == json.dumps(json.loads(GOLDEN))


def test_there_and_back(tmp_path):
    """A written plan is read back as the same plan, with two schemes of one name as well."""
    assert plan_from_json(plain()) == PLAN
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_to_json(PLAN)))
    assert read_plan(path) == PLAN
    empty = Plan(format="onnx", model="a", prepared="a", rules=())
    assert plan_from_json(plan_to_json(empty)) == empty


def read_mistakes(change):
    """The lines that reading the changed JSON gives, without the place of the file and the hint."""
    data = plain()
    change(data)
    with pytest.raises(UsageError) as raised:
        plan_from_json(data, "p.json")
    lines = str(raised.value).splitlines()
    assert "`graphquant plan --format json`" in lines[-1]
    return [line.removeprefix("p.json: ") for line in lines[:-1]]


def test_all_mistakes_at_once():
    """Unknown keys, wrong types, unknown schemes, bad tensors and bad numbers are told together, with their places."""

    def change(data):
        data["extra"] = 1
        data["format"] = 3
        data["schemes"]["weight"]["narow"] = True
        data["schemes"]["unit"]["bits"] = 99
        del data["schemes"]["weight_2"]["family"]
        data["sites"][0]["tensor"] = "w:0"
        data["sites"][1]["uses"][0]["slot"] = "1"
        data["sites"][2]["scheme"] = ["x"]
        data["sites"].append({"scheme": "unknown"})
        data["sites"].append(7)
        data["skips"] = 5
        data["steps"][0]["more"] = 1

    lines = read_mistakes(change)
    assert [re.match(r"unknown key '\w+'|[\w.\[\]']+", line).group() for line in lines] == [
        "unknown key 'extra'",
        "schemes.weight.narow",
        "schemes.unit.bits",
        "schemes.weight_2",
        "sites[0].tensor",
        "sites[1].uses[0].slot",
        "sites[2].scheme",
        "sites[3].scheme",
        "sites[4]",
        "'skips'",
        "steps[0].more",
        "format",
    ]


@pytest.mark.parametrize(
    ("index", "key", "value", "said"),
    [
        (1, "range", [2.0, 1.0], "'range' .*low, high"),
        (1, "range", [0.0, float("nan")], "'range' .*low, high"),
        (1, "range", [0.0, float("inf")], "'range' .*low, high"),
        (2, "scale", [0.0], "'scale' .*positive"),
        (2, "scale", [-1.0], "'scale' .*positive"),
        (2, "scale", [1e300], "'scale' .*positive"),
        (2, "scale", [1.0, 2.0], "'zero_point' needs 'scale'"),
        (2, "scale", [], "'zero_point' needs 'scale'"),
        (2, "scale", None, "'zero_point' needs 'scale'"),
        (2, "zero_point", [256], r"'zero_point' .*\[0, 255\]"),
        (2, "zero_point", [10**30], r"'zero_point' .*\[0, 255\]"),
        (2, "zero_point", [0.5], "valid integer"),
    ],
)
def test_numbers_of_a_site(index, key, value, said):
    """Ranges, scales and zero points that no type can have are told."""
    (line,) = read_mistakes(lambda data: data["sites"][index].update({key: value}))
    assert line.startswith(f"sites[{index}]")
    assert re.search(said, line)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"schema": 3}',
        b"[]",
        b"9" * 5000,
        b'{"schema": true}',
        b'{"schema": 2}',
    ],
)
def test_files_that_are_no_plan(tmp_path, content):
    """Any other file is a UsageError that names it."""
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"plan\.json"):
        read_plan(path)


def test_no_file(tmp_path):
    """A missing file is a UsageError with the reason."""
    with pytest.raises(UsageError, match=r"none\.json cannot be read: "):
        read_plan(tmp_path / "none.json")
    with pytest.raises(UsageError):
        read_plan(tmp_path / "a\0b.json")


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["weight", "", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["op", "port", "slot", "graph", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)


def json_paths(data, path=()):
    """The path of every value in JSON data."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from json_paths(value, (*path, key))


JSON_PATHS = list(json_paths(plan_to_json(PLAN)))[1:]


@given(st.lists(st.tuples(st.sampled_from(JSON_PATHS), values | st.just("delete")), min_size=1, max_size=3))
def test_any_edit_is_read_or_refused(edits):
    """Whatever is put in any place, the answer is a plan that can be written again, or a UsageError."""
    data = plain()
    for path, value in edits:
        container = data
        try:
            for key in path[:-1]:
                container = container[key]
            if value == "delete":
                del container[path[-1]]
            else:
                container[path[-1]] = copy.deepcopy(value)
        except (LookupError, TypeError):
            continue
    try:
        plan = plan_from_json(data)
    except UsageError:
        return
    assert plan_from_json(plan_to_json(plan)) == plan
