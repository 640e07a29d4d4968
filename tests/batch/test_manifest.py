"""Entries of a batch from a manifest, or from paths and globs."""

import dataclasses
import json
import os
import posixpath
import random
import string
import tomllib
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from graphquant.batch.manifest import MANIFEST_NAME, PROJECT_FILE, load_entries
from graphquant.batch.manifest_schema import MANIFEST_FORM, OMITTED_OPTIONS, EntrySettings, manifest_schema, set_keys
from graphquant.batch.types import Entry, Gates
from graphquant.errors import ManifestError, UsageError
from graphquant.rules.toml_document import field_descriptions, table_keys
from graphquant.utils.options import InsertOptions, option_fields

MODELS = {
    "a.onnx": "",
    "a.onnx.data": "",
    "a.quant.onnx": "",
    "b.pb": "",
    "notes.txt": "",
    "labels.json": "",
    ".hidden.onnx": "",
    "net/saved_model.pb": "",
    "net/variables/variables.index": "",
    "net/fingerprint.pb": "",
    "net.quant/saved_model.pb": "",
    "deep/c.onnx": "",
    "deep/keras.keras": "",
    "deep/test_data_set_0/input_0.pb": "",
}


@pytest.fixture
def empty_models(tmp_path, monkeypatch):
    """Create empty model files, and make their folder the current one."""
    for name in MODELS:
        path = tmp_path / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load_manifest_text(text, path=MANIFEST_NAME):
    """Write a manifest and return its entries."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, "utf-8")
    return load_entries([path])


def assert_mistakes(lines, expected):
    """Assert the file, the line and the quoted names of each message."""
    assert [line.partition(": ")[0] for line in lines] == [place for place, *_ in expected]
    named = [(line, name) for line, (_, *names) in zip(lines, expected, strict=True) for name in names]
    assert [(line, name) for line, name in named if name not in line] == []


def manifest_mistakes(text, path=MANIFEST_NAME):
    """Return the lines of the ManifestError that a manifest raises."""
    with pytest.raises(ManifestError) as caught:
        load_manifest_text(text, path)
    return str(caught.value).split("\n")


def test_glob_matches_models_only(empty_models):
    """A glob matches no other files, outputs of earlier runs or files inside a SavedModel."""
    assert [entry.model for entry in load_entries(["models/*"])] == ["models/a.onnx", "models/b.pb", "models/net"]
    assert [entry.model for entry in load_entries(["models/**/*"])] == [
        "models/a.onnx",
        "models/b.pb",
        "models/deep/c.onnx",
        "models/deep/keras.keras",
        "models/net",
    ]
    assert [entry.model for entry in load_entries(["models/**"])] == [
        entry.model for entry in load_entries(["models/**/*"])
    ]


def test_glob_with_an_explicit_suffix(empty_models):
    """A glob that contains a suffix or .quant matches such files."""
    assert [entry.model for entry in load_entries(["models/*.json"])] == ["models/labels.json"]
    assert [entry.model for entry in load_entries(["models/*.quant.onnx"])] == ["models/a.quant.onnx"]


def test_default_outputs(empty_models):
    """An output is next to its model. The output of a SavedModel or a Keras file is a folder."""
    outputs = {entry.model: entry.output for entry in load_entries(["models/**/*"])}
    assert outputs == {
        "models/a.onnx": "models/a.quant.onnx",
        "models/b.pb": "models/b.quant.pb",
        "models/deep/c.onnx": "models/deep/c.quant.onnx",
        "models/deep/keras.keras": "models/deep/keras.quant",
        "models/net": "models/net.quant",
    }


def test_paths_keep_their_order(empty_models):
    """Paths keep their order. A path that a glob matches too appears once, at its own position."""
    names = ["models/b.pb", "models/*.onnx", "models/a.onnx", "./models//b.pb"]
    assert [entry.name for entry in load_entries(names)] == ["models/b.pb", "models/a.onnx"]


def test_options_override_the_manifest(empty_models):
    """Options of the command line are in every entry and override the manifest."""
    options = {"rules": ("fixed_point",), "samples": 3, "max_size": "2MB", "check": True, "min_sqnr": None}
    expected = {"rules": ("fixed_point",), "samples": 3, "gates": Gates(max_size=2_000_000, check="")}
    Path(MANIFEST_NAME).write_text(
        '[defaults]\nsamples = 9\n[[model]]\npath = "models/a.onnx"\nrules = "generic"\n', "utf-8"
    )
    for names in ([], ["models/a.onnx"]):
        (entry,) = load_entries(names, options)
        assert entry == Entry(name="models/a.onnx", model="models/a.onnx", output="models/a.quant.onnx", **expected)


FULL = """
[defaults]
rules = ["mine.toml", "onnxruntime"]
data = "calib/{stem}.npz"
samples = 100
output = "out/{variant}/{stem}.quant{suffix}"
min_sqnr = 20
check = "onnxruntime"
exclude = "head/*"

[[model]]
path = "a.onnx"
min_sqnr = 30.5
check = false

[[model]]
path = ["*.onnx", "*.pb", "deep/*"]
exclude_models = "deep/k*"
min_agreement = "98%"
include = ["x", "/y/"]

[[model]]
path = "a.onnx"
variant = "trt"
rules = "tensorrt"
stats = "{name}.gqs"
min_sqnr = -3
method = "mse"
float_weights = true
"""


@pytest.mark.parametrize("folder", ["", "up/", "up/down/../"])
def test_full_manifest(empty_models, folder):
    """Defaults apply, paths are relative to the manifest, and a path overrides a glob before or after it."""
    home = empty_models / folder
    home.mkdir(parents=True, exist_ok=True)
    for path in (empty_models / "models").iterdir():
        path.rename(home / path.name)
    for stem in ("a", "b", "c"):
        (home / "calib").mkdir(exist_ok=True)
        (home / "calib" / f"{stem}.npz").touch()
    (home / "a.onnx.gqs").touch()
    (home / "mine.toml").touch()
    text = FULL.replace("min_sqnr = -3\n", 'data = "calib/a.npz"\nmin_sqnr = -3\n').replace(
        'stats = "{name}.gqs"\n', ""
    )
    prefix = posixpath.normpath(folder) + "/" if folder else ""
    entries = load_manifest_text(text, f"{folder}{MANIFEST_NAME}")
    common = {"rules": (f"{folder.rstrip('/')}/mine.toml" if folder else "mine.toml", "onnxruntime")}
    assert [entry.name for entry in entries] == ["a.onnx", "b.pb", "deep/c.onnx", "a.onnx [trt]"]
    assert [entry.model for entry in entries] == [
        f"{prefix}{name}" for name in ("a.onnx", "b.pb", "deep/c.onnx", "a.onnx")
    ]
    assert [entry.output for entry in entries] == [
        f"{prefix}out/{name}" for name in ("a.quant.onnx", "b.quant.pb", "c.quant.onnx", "trt/a.quant.onnx")
    ]
    assert [PurePosixPath(os.path.normpath(entry.data)).as_posix() for entry in entries] == [
        f"{prefix}calib/{stem}.npz" for stem in ("a", "b", "c", "a")
    ]
    assert [entry.rules for entry in entries] == [common["rules"]] * 3 + [("tensorrt",)]
    assert [entry.gates for entry in entries] == [
        Gates(min_sqnr=30.5),
        Gates(min_sqnr=20, min_agreement=0.98, check="onnxruntime"),
        Gates(min_sqnr=20, min_agreement=0.98, check="onnxruntime"),
        Gates(min_sqnr=-3, check="onnxruntime"),
    ]
    assert [(entry.include, entry.exclude) for entry in entries[1:]] == [
        (("x", "/y/"), ("head/*",)),
        (("x", "/y/"), ("head/*",)),
        ((), ("head/*",)),
    ]
    assert [(entry.method, entry.float_weights) for entry in entries] == [(None, False)] * 3 + [("mse", True)]


def test_entries_without_models_are_reported(empty_models):
    """An entry whose models all belong to others, or are excluded, is a warning with its line; a path may take them."""
    text = '[[model]]\npath = "models/**/*.onnx"\n[[model]]\npath = ["models/a*", "models/*/c.onnx"]\n'
    text += '[[model]]\npath = "models/*.pb"\nexclude_models = "models/b*"\n'
    Path(MANIFEST_NAME).write_text(text, "utf-8")
    warnings = []
    entries = load_entries(on_warning=warnings.append)
    assert [entry.model for entry in entries] == ["models/a.onnx", "models/deep/c.onnx"]
    assert_mistakes(warnings, [(f"{MANIFEST_NAME}:4", "[[model]] 1"), (f"{MANIFEST_NAME}:6", "'exclude_models'")])
    text = '[[model]]\npath = "models/b*"\n[[model]]\npath = "models/b.pb"\n'
    Path(MANIFEST_NAME).write_text(text, "utf-8")
    warnings.clear()
    load_entries(on_warning=warnings.append)
    assert_mistakes(warnings, [(f"{MANIFEST_NAME}:2", "[[model]] 2")])
    warnings.clear()
    load_entries(["models/a.onnx", "models/*.onnx"], on_warning=warnings.append)
    assert not warnings


def test_data_overrides_statistics(empty_models):
    """An entry's data replaces default statistics. An entry's statistics are combined with default data."""
    Path("s.gqs").touch()
    (entry,) = load_manifest_text('[defaults]\nstats = "s.gqs"\n[[model]]\npath = "models/a.onnx"\ndata = "random:3"\n')
    assert (entry.data, entry.stats) == ("random:3", None)
    (entry,) = load_manifest_text('[defaults]\ndata = "random:3"\n[[model]]\npath = "models/a.onnx"\nstats = "s.gqs"\n')
    assert (entry.data, entry.stats) == ("random:3", "s.gqs")


def test_pyproject_manifest(empty_models):
    """[tool.graphquant] of pyproject.toml is used without a graphquant.toml. Line numbers are of the file."""
    text = '[project]\nname = "x"\n[tool.other]\na = 1\n[[tool.graphquant.model]]\npath = "models/*.pb"\n'
    Path(PROJECT_FILE).write_text(text, "utf-8")
    assert [entry.model for entry in load_entries()] == ["models/b.pb"]
    mistakes = manifest_mistakes(f"{text}rule = 'x'\n", PROJECT_FILE)
    assert_mistakes(mistakes, [("pyproject.toml:7", "'rule'", "Did you mean 'rules'?")])
    Path(MANIFEST_NAME).write_text('[[model]]\npath = "models/a.onnx"\n', "utf-8")
    assert [entry.model for entry in load_entries()] == ["models/a.onnx"]


@pytest.mark.parametrize("manifest", [MANIFEST_NAME, PROJECT_FILE])
@pytest.mark.parametrize("data", ["code:samples", "a:samples", "{stem}:samples"])
def test_code_of_a_manifest_needs_the_command_line(empty_models, manifest, data):
    """Data of a manifest that is Python code is a mistake, unless the command line allows code or sets other data."""
    prefix = "tool.graphquant." if manifest == PROJECT_FILE else ""
    text = f"[{prefix}defaults]\ndata = '{data}'\n[[{prefix}model]]\npath = 'models/a.onnx'\n"
    Path(manifest).write_text(text, "utf-8")
    with pytest.raises(ManifestError, match="--allow-code"):
        load_entries()
    (entry,) = load_entries(allow_code=True)
    assert entry.data == data.format(stem="a")
    (entry,) = load_entries([], {"data": "code:samples"})
    assert entry.data == "code:samples"
    Path(manifest).write_text(f"{text}allow_code = true\n", "utf-8")
    with pytest.raises(ManifestError, match="allow_code"):
        load_entries(allow_code=True)


def test_metric_of_a_manifest_needs_the_command_line(empty_models):
    """A metric of a manifest is code, which data on the command line does not allow."""
    text = "[defaults]\ndata = 'random:3'\nmetric = 'code:score'\n[[model]]\npath = 'models/a.onnx'\n"
    Path(MANIFEST_NAME).write_text(text, "utf-8")
    for overrides in ({}, {"data": "random:4"}):
        with pytest.raises(ManifestError, match="--allow-code"):
            load_entries([], overrides)
    (entry,) = load_entries(allow_code=True)
    assert entry.metric == "code:score"
    (entry,) = load_entries([], {"metric": "code:other"})
    assert entry.metric == "code:other"


def test_missing_manifest(empty_models):
    """A missing manifest, or a pyproject.toml without the table, raises UsageError with the file's name."""
    with pytest.raises(UsageError, match=r"graphquant\.toml or pyproject\.toml"):
        load_entries()
    Path(PROJECT_FILE).write_text("[project]\n", "utf-8")
    with pytest.raises(UsageError, match=r"graphquant\.toml"):
        load_entries()
    with pytest.raises(UsageError, match=r"pyproject\.toml has no table \[tool\.graphquant\]"):
        load_entries([PROJECT_FILE])
    with pytest.raises(UsageError, match=r"no manifest no\.toml"):
        load_entries(["no.toml"])


def test_all_invalid_values_are_reported(empty_models):
    """Every invalid key and value is reported with its line and the nearest valid name."""
    lines = manifest_mistakes(
        """[default]
[defaults]
check = "onnxruntme"
max_size = "5 apples"
samples = 0
rules = 3

[[model]]
method = "minmx"
min_agreement = 98
path = []
float_weights = "yes"
variant = "a b"
"""
    )
    assert_mistakes(
        lines,
        [
            ("graphquant.toml:1", "'default'"),
            ("graphquant.toml:3", "Did you mean 'onnxruntime'"),
            ("graphquant.toml:4", "'5 apples'"),
            ("graphquant.toml:5", "'samples'"),
            ("graphquant.toml:6", "array of strings"),
            ("graphquant.toml:9", "Did you mean 'minmax'"),
            ("graphquant.toml:10", "98%"),
            ("graphquant.toml:11", "'path'"),
            ("graphquant.toml:12", "'float_weights'"),
            ("graphquant.toml:13", "'variant'"),
        ],
    )


def test_all_invalid_models_are_reported(empty_models):
    """Missing models, data, statistics and rules, and clashing outputs are reported together, by line."""
    Path("bad.toml").write_text("a = 1\nb = 2\n", "utf-8")
    lines = manifest_mistakes(
        """[defaults]
data = "nowhere.npz"
rules = ["onnxruntme"]

[[model]]
path = ["models/x.onnx", "models/*.onx", "models/a.onx"]

[[model]]
path = "models/a.onnx"
rules = "bad.toml"
stats = "no.gqs"
output = "models/{stm}b.pb"

[[model]]
path = "models/b.pb"

[[model]]
path = "./models/a.onnx"
"""
    )
    expected = [
        ("graphquant.toml:2", "nowhere.npz"),
        ("graphquant.toml:3", "'onnxruntme'"),
        ("graphquant.toml:6", "'models/x.onnx'"),
        ("graphquant.toml:6", "'models/*.onx'"),
        ("graphquant.toml:6", "'models/a.onx'"),
        ("graphquant.toml:11", "no.gqs"),
        ("graphquant.toml:12", "'{stm}'"),
        ("graphquant.toml:12", "over models/b.pb"),
        ("graphquant.toml:18", "'models/a.onnx'"),
        ("bad.toml:1", "'a'"),
        ("bad.toml:2", "'b'"),
    ]
    assert_mistakes(lines, expected)
    assert lines[6].endswith("Did you mean 'stem'?")


def test_invalid_keys_do_not_hide_other_mistakes(empty_models):
    """Invalid keys, globs without matches, and missing data and rules are reported in one run."""
    Path("bad.toml").write_text("a = 1\n", "utf-8")
    lines = manifest_mistakes(
        """[defaults]
sampels = 5
max_size = "5 apples"
rules = ["onnxruntme", "tensorflw", "bad.toml"]
min_sqnr = 30

[[model]]
path = "models/*.onx"
data = "nowhere.npz"
output = "{stm}"

[[model]]
path = "models/a.onnx"
stats = "{stem}.gqs"
family = "onx"

[[model]]
pth = "models/b.pb"
rules = "nothing"
data = "there.npz"
"""
    )
    expected = [
        ("graphquant.toml:2", "'sampels'"),
        ("graphquant.toml:3", "'5 apples'"),
        ("graphquant.toml:4", "'onnxruntme'"),
        ("graphquant.toml:4", "'tensorflw'"),
        ("graphquant.toml:5", "'min_sqnr'"),
        ("graphquant.toml:8", "'models/*.onx'"),
        ("graphquant.toml:9", "nowhere.npz"),
        ("graphquant.toml:10", "'{stm}'"),
        ("graphquant.toml:14", "a.gqs"),
        ("graphquant.toml:15", "'onx'"),
        ("graphquant.toml:17", "'path'"),
        ("graphquant.toml:18", "'pth'"),
        ("graphquant.toml:19", "'nothing'"),
        ("graphquant.toml:20", "there.npz"),
        ("bad.toml:1", "'a'"),
    ]
    assert_mistakes(lines, expected)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[[model]]\npath = 'models/*.onnx'\ndatta = 'random:3'\nmin_sqnr = 3", 3),
        ("[[model]]\npath = 'models/*.onnx'\ndata = ''\nmin_sqnr = 3", 3),
        ("[[model]]\npath = 'models/a.onnx'\n[[model]]\npath = 'models/a.onnx'\nvarint = 'b'", 5),
        ("[[model]]\npath = 'models/**'\noutput = 'x/{name}'\nexclude_modls = 'models/deep/*'\ndata = '{stem}.npz'", 4),
        ("[[model]]\npath = 'models/*.onnx'\n[[model]]\npath = 'models/deep/*.onnx'\noutptu = 'models/a.onnx'", 5),
        ("[deflts]\ndata = 'random:3'\n[[model]]\npath = 'models/*.onnx'\nmin_sqnr = 3", 1),
        ("defaults = 3\n[[model]]\npath = 'models/*.onnx'\nmin_sqnr = 3", 1),
        ("[[model]]\npath = 'models/a.onnx'\n[[model]]", 3),
        ("model = [3, {path = 'models/a.onnx'}]", 1),
    ],
)
def test_consequences_of_a_mistake_are_not_reported(empty_models, text, line):
    """A misspelled key is the only mistake reported, without its consequences."""
    (message,) = manifest_mistakes(text)
    assert message.startswith(f"graphquant.toml:{line}: ")


def test_clashing_outputs(empty_models):
    """Two entries cannot have one output, nor one inside a SavedModel's folder, in any spelling of the path."""
    Path("link").symlink_to("models")
    mistakes = manifest_mistakes(
        """
[[model]]
path = ["models/*.onnx", "models/deep/*.onnx"]
output = "models/net/x/../all.onnx"

[[model]]
path = "models/b.pb"
output = "link/b.pb"

[[model]]
path = "models/net"

[[model]]
path = "models/b.pb"
variant = "other"
output = "models/net.quant"
"""
    )
    assert_mistakes(
        mistakes,
        [
            ("graphquant.toml:4", "models/a.onnx ", " folder of models/net,"),
            ("graphquant.toml:4", "models/net/all.onnx ", " models/a.onnx and of models/deep/c.onnx.", "{parent}"),
            ("graphquant.toml:4", "models/deep/c.onnx ", " folder of models/net,"),
            ("graphquant.toml:8", "models/b.pb ", " over models/b.pb,"),
            ("graphquant.toml:16", "models/net.quant ", " models/net and of models/b.pb [other].", "{parent}"),
        ],
    )


def test_gate_without_data(empty_models):
    """A measured gate without data is reported at the gate's line."""
    mistakes = manifest_mistakes('[defaults]\nmin_sqnr = 20\n[[model]]\npath = "models/a.onnx"\n')
    assert_mistakes(mistakes, [("graphquant.toml:2", "'min_sqnr'", "models/a.onnx", "'data'")])


def test_empty_and_invalid_manifests(empty_models):
    """A manifest without models, invalid TOML, and a table instead of an array are reported."""
    example = "[[model]] and path = 'models/*.onnx'."
    assert_mistakes(manifest_mistakes("[defaults]\n"), [("graphquant.toml:1", example)])
    assert_mistakes(manifest_mistakes("path = models"), [("graphquant.toml:1", "column 8")])
    assert_mistakes(
        manifest_mistakes("[model]\npath = 'x'"), [("graphquant.toml:1", "'model'", "array", " [[model]].")]
    )


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["models/x.onnx"], r"There is no model 'models/x\.onnx'\."),
        (["modls/*"], r"'modls/\*' names nothing\. Did you mean 'models'\?"),
        (["models/*.txt"], r"'models/\*\.txt' names 1 .* no model"),
        (["models"], r"models is a folder .* models/\* "),
        (["models/notes.txt"], r"models/notes\.txt .* \.onnx, "),
        (["models/" + "x" * 300], "models/xxx"),
        (["models/a.onx"], r"There is no model 'models/a\.onx'\. Did you mean 'a\.onnx'"),
    ],
)
def test_patterns_without_matches(empty_models, names, pattern):
    """Errors for command-line patterns have no file name, and suggest the nearest model."""
    with pytest.raises(ManifestError, match=f"^{pattern}"):
        load_entries(names)


@pytest.mark.parametrize(("name", "message"), [("", " is empty."), ("x" * 5000, "entry 2 of 'path' ")])
def test_invalid_names(empty_models, name, message):
    """Empty and too long names raise UsageError."""
    with pytest.raises(UsageError, match=message):
        load_entries(["models/a.onnx", name])


def test_nul_in_names(empty_models):
    """The character NUL is reported at its line, in paths and in outputs."""
    mistakes = manifest_mistakes('[defaults]\noutput = "a\\u0000b"\n[[model]]\npath = "models/a\\u0000*"\n')
    assert_mistakes(mistakes, [("graphquant.toml:2", "NUL"), ("graphquant.toml:4", "NUL")])


def test_invalid_options(empty_models):
    """An invalid option value raises UsageError as in a manifest."""
    with pytest.raises(UsageError, match="no method 'minmx'"):
        load_entries(["models/*"], {"method": "minmx"})


def test_remote_globs(empty_models):
    """Globs match remote models through fsspec, with outputs next to them."""
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    try:
        for name in MODELS:
            system.pipe(f"/zoo/{name}", b"")
        entries = load_entries(["memory://zoo/**/*"])
        assert [entry.model for entry in entries] == [
            f"memory:///zoo/{name}" for name in ("a.onnx", "b.pb", "deep/c.onnx", "deep/keras.keras", "net")
        ]
        assert [entry.output for entry in entries][-2:] == ["memory:///zoo/deep/keras.quant", "memory:///zoo/net.quant"]
        (entry,) = load_entries(["memory://zoo/a.onnx"], {"output": "memory://out/{name}"})
        assert (entry.model, entry.output) == ("memory://zoo/a.onnx", "memory://out/a.onnx")
        with pytest.raises(ManifestError, match=r"no model 'memory://zoo/aa\.onnx'\. Did you mean 'a\.onnx'"):
            load_entries(["memory://zoo/aa.onnx"])
    finally:
        system.rm("/zoo", recursive=True)


def test_schema(empty_models):
    """Valid manifests match the JSON schema, invalid ones do not, and every key has a description."""
    schema = manifest_schema()
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    assert list(validator.iter_errors(tomllib.loads(FULL))) == []
    for invalid in (
        '[defaults]\nmethod = "x"',
        "[[model]]\nrules = 'x'",
        "[[model]]\npath = 3",
        "[defaults]\nmin_sqnr = 'x'",
    ):
        assert len(list(validator.iter_errors(tomllib.loads(invalid)))) == 1
    for name in ("EntrySettings", "ModelTable"):
        assert all(len(entry["description"]) > 10 for entry in schema["$defs"][name]["properties"].values())
    json.dumps(schema)


def test_docstrings_name_every_key():
    """Every key of a manifest table has a description."""
    for table in MANIFEST_FORM.tables.values():
        assert field_descriptions(table).keys() >= set(table_keys(table))


_VALUES = st.fixed_dictionaries(
    {},
    optional={
        "samples": st.integers(1, 9),
        "method": st.sampled_from(["minmax", "mse"]),
        "family": st.just("onnx-qdq"),
        "include": st.tuples(st.sampled_from("xyz")),
        "float_weights": st.booleans(),
        "max_size": st.integers(1, 99),
        "check": st.sampled_from([True, False, "onnxruntime"]),
    },
)


@settings(max_examples=60, deadline=None)
@given(defaults=_VALUES, of_entry=_VALUES, of_options=_VALUES)
def test_precedence_of_settings(tmp_path_factory, defaults, of_entry, of_options):
    """A value comes from the command line, else the entry, else the defaults, else the built-in default."""
    folder = tmp_path_factory.getbasetemp() / "layers"
    folder.mkdir(exist_ok=True)
    (folder / "a.onnx").touch()
    path = folder / MANIFEST_NAME
    rows = ["[defaults]", *_toml_lines(defaults), "[[model]]", 'path = "a.onnx"', *_toml_lines(of_entry)]
    path.write_text("\n".join(rows), "utf-8")
    (entry,) = load_entries([str(path)], of_options)
    expected = {"samples": None, "method": None, "family": None, "include": (), "float_weights": False}
    expected |= {"max_size": None, "check": False, **defaults, **of_entry, **of_options}
    check = {True: "", False: None}.get(expected.pop("check"), "onnxruntime")
    gates = Gates(max_size=expected.pop("max_size"), check=check)
    assert {key: getattr(entry, key) for key in expected} == expected
    assert entry.gates == gates


def _toml_lines(values):
    return [f"{key} = {json.dumps(value)}" for key, value in values.items()]


@settings(max_examples=60, deadline=None)
@given(
    files=st.lists(st.text("ab.", min_size=1, max_size=3).map(lambda text: f"x{text}x.onnx"), max_size=6, unique=True),
    globs=st.lists(st.sampled_from(["x*", "*.onnx", "xa*", "**/*", "xab*x.onnx", "x[ab]*"]), min_size=1, max_size=3),
    rng=st.randoms(use_true_random=False),
)
def test_paths_override_globs(tmp_path_factory, files, globs, rng):
    """Every matched model has one entry. It has the settings of the first path, else of the first glob."""
    folder = Path(tmp_path_factory.mktemp("globs"))
    for name in files:
        (folder / name).touch()
    patterns = [*globs, *rng.sample(files, min(2, len(files)))]
    rng.shuffle(patterns)
    tables = [f"[[model]]\npath = {json.dumps(name)}\nsamples = {number + 1}" for number, name in enumerate(patterns)]
    path = folder / MANIFEST_NAME
    path.write_text("\n".join(tables), "utf-8")
    expected = {}
    for exact in (True, False):
        for number, name in enumerate(patterns):
            for file in files:
                if exact == (name in files) and (PurePosixPath(file).match(name.replace("**/", ""))):
                    expected.setdefault(file, number + 1)
    unmatched = [
        name for name in patterns if not any(PurePosixPath(file).match(name.replace("**/", "")) for file in files)
    ]
    if unmatched:
        with pytest.raises(ManifestError) as caught:
            load_entries([str(path)])
        assert len(str(caught.value).split("\n")) == len(unmatched)
    else:
        assert [(entry.name, entry.samples) for entry in load_entries([str(path)])] == sorted(
            expected.items(), key=lambda item: (item[1], item[0])
        )


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(
            [*FULL.splitlines(), "[[model]]", "[model]", "path = 'a'", "x = 1", "{", "path = [1]", "defaults = 3"]
        )
        | st.text(string.printable, max_size=20),
        max_size=12,
    ).map("\n".join)
)
def test_any_manifest_gives_entries_or_mistakes(tmp_path_factory, text):
    """Any text gives entries or a list of mistakes with file and line."""
    path = tmp_path_factory.getbasetemp() / f"any-{random.Random(text).getrandbits(32)}.toml"  # noqa: S311  # a name
    path.write_text(text, "utf-8")
    try:
        lines = load_entries([str(path)]) and []
    except ManifestError as error:
        lines = str(error).split("\n")
    path.unlink()
    assert [line for line in lines if not line.startswith(f"{path}:")] == []


def test_only_set_keys_are_returned():
    """set_keys returns only the keys that were set."""
    assert set_keys(EntrySettings(samples=3, check=False)) == {"samples": 3, "check": False}


def test_every_option_of_insert_exists():
    """Manifests and entries have every option of `insert` that is not in OMITTED_OPTIONS with a reason."""
    options = {option.name for option in option_fields(InsertOptions)}
    setting_names = {setting.name for setting in dataclasses.fields(EntrySettings)}
    entry_fields = {setting.name for kind in (Entry, Gates) for setting in dataclasses.fields(kind)}
    assert options - setting_names == OMITTED_OPTIONS.keys()
    assert setting_names <= entry_fields
    assert all(OMITTED_OPTIONS.values())
