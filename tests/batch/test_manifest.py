"""What a manifest, or paths and globs, make of the models that there are."""

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
from graphquant.rules import field_descriptions, table_keys
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
def here(tmp_path, monkeypatch):
    """A folder with models that nobody reads, and the current one."""
    for name in MODELS:
        path = tmp_path / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def manifest(text, path=MANIFEST_NAME):
    """Writes a manifest and gives its entries."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, "utf-8")
    return load_entries([path])


def assert_mistakes(lines, expected):
    """Assert the file, the line and a quoted name of each message."""
    assert [line.partition(": ")[0] for line in lines] == [place for place, _ in expected]
    assert [(line, name) for line, (_, name) in zip(lines, expected, strict=True) if name not in line] == []


def mistakes(text, path=MANIFEST_NAME):
    """The lines that a manifest with mistakes is answered."""
    with pytest.raises(ManifestError) as caught:
        manifest(text, path)
    return str(caught.value).split("\n")


def test_a_glob_takes_models_only(here):
    """Files beside models, outputs of earlier runs and what is inside a SavedModel are none."""
    assert [one.model for one in load_entries(["models/*"])] == ["models/a.onnx", "models/b.pb", "models/net"]
    assert [one.model for one in load_entries(["models/**/*"])] == [
        "models/a.onnx",
        "models/b.pb",
        "models/deep/c.onnx",
        "models/deep/keras.keras",
        "models/net",
    ]
    assert [one.model for one in load_entries(["models/**"])] == [one.model for one in load_entries(["models/**/*"])]


def test_a_glob_with_an_explicit_suffix(here):
    """A suffix or a .quant in the glob itself is taken at its word."""
    assert [one.model for one in load_entries(["models/*.json"])] == ["models/labels.json"]
    assert [one.model for one in load_entries(["models/*.quant.onnx"])] == ["models/a.quant.onnx"]


def test_outputs_by_default(here):
    """An output stands beside its model, a SavedModel's and a Keras file's as a folder."""
    made = {one.model: one.output for one in load_entries(["models/**/*"])}
    assert made == {
        "models/a.onnx": "models/a.quant.onnx",
        "models/b.pb": "models/b.quant.pb",
        "models/deep/c.onnx": "models/deep/c.quant.onnx",
        "models/deep/keras.keras": "models/deep/keras.quant",
        "models/net": "models/net.quant",
    }


def test_paths_in_the_order_given(here):
    """Paths keep their order; one that a glob names too stands where it was named, once."""
    names = ["models/b.pb", "models/*.onnx", "models/a.onnx", "./models//b.pb"]
    assert [one.name for one in load_entries(names)] == ["models/b.pb", "models/a.onnx"]


def test_options_reach_every_entry(here):
    """What the command line says is in each entry, and wins over a manifest."""
    options = {"rules": ("fixed_point",), "samples": 3, "max_size": "2MB", "check": True, "min_sqnr": None}
    expected = {"rules": ("fixed_point",), "samples": 3, "gates": Gates(max_size=2_000_000, check="")}
    Path(MANIFEST_NAME).write_text(
        '[defaults]\nsamples = 9\n[[model]]\npath = "models/a.onnx"\nrules = "generic"\n', "utf-8"
    )
    for names in ([], ["models/a.onnx"]):
        (one,) = load_entries(names, options)
        assert one == Entry(name="models/a.onnx", model="models/a.onnx", output="models/a.quant.onnx", **expected)


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
def test_a_whole_manifest(here, folder):
    """Defaults are filled in, paths are those of the manifest's folder, a path wins over a glob before or after it."""
    home = here / folder
    home.mkdir(parents=True, exist_ok=True)
    for path in (here / "models").iterdir():
        path.rename(home / path.name)
    for stem in ("a", "b", "c"):
        (home / "calib").mkdir(exist_ok=True)
        (home / "calib" / f"{stem}.npz").touch()
    (home / "a.onnx.gqs").touch()
    (home / "mine.toml").touch()
    text = FULL.replace("min_sqnr = -3\n", 'data = "calib/a.npz"\nmin_sqnr = -3\n').replace(
        'stats = "{name}.gqs"\n', ""
    )
    at = posixpath.normpath(folder) + "/" if folder else ""
    found = manifest(text, f"{folder}{MANIFEST_NAME}")
    common = {"rules": (f"{folder.rstrip('/')}/mine.toml" if folder else "mine.toml", "onnxruntime")}
    assert [one.name for one in found] == ["a.onnx", "b.pb", "deep/c.onnx", "a.onnx [trt]"]
    assert [one.model for one in found] == [f"{at}{name}" for name in ("a.onnx", "b.pb", "deep/c.onnx", "a.onnx")]
    assert [one.output for one in found] == [
        f"{at}out/{name}" for name in ("a.quant.onnx", "b.quant.pb", "c.quant.onnx", "trt/a.quant.onnx")
    ]
    assert [PurePosixPath(os.path.normpath(one.data)).as_posix() for one in found] == [
        f"{at}calib/{stem}.npz" for stem in ("a", "b", "c", "a")
    ]
    assert [one.rules for one in found] == [common["rules"]] * 3 + [("tensorrt",)]
    assert [one.gates for one in found] == [
        Gates(min_sqnr=30.5),
        Gates(min_sqnr=20, min_agreement=0.98, check="onnxruntime"),
        Gates(min_sqnr=20, min_agreement=0.98, check="onnxruntime"),
        Gates(min_sqnr=-3, check="onnxruntime"),
    ]
    assert [(one.include, one.exclude) for one in found[1:]] == [
        (("x", "/y/"), ("head/*",)),
        (("x", "/y/"), ("head/*",)),
        ((), ("head/*",)),
    ]
    assert [(one.method, one.float_weights) for one in found] == [(None, False)] * 3 + [("mse", True)]


def test_data_overrides_statistics(here):
    """An entry's data replaces the defaults' statistics; its own statistics stand beside the defaults' data."""
    Path("s.gqs").touch()
    (one,) = manifest('[defaults]\nstats = "s.gqs"\n[[model]]\npath = "models/a.onnx"\ndata = "random:3"\n')
    assert (one.data, one.stats) == ("random:3", None)
    (one,) = manifest('[defaults]\ndata = "random:3"\n[[model]]\npath = "models/a.onnx"\nstats = "s.gqs"\n')
    assert (one.data, one.stats) == ("random:3", "s.gqs")


def test_a_pyproject(here):
    """[tool.graphquant] of a pyproject.toml is a manifest where there is no graphquant.toml; lines are the file's."""
    text = '[project]\nname = "x"\n[tool.other]\na = 1\n[[tool.graphquant.model]]\npath = "models/*.pb"\n'
    Path(PROJECT_FILE).write_text(text, "utf-8")
    assert [one.model for one in load_entries()] == ["models/b.pb"]
    assert mistakes(f"{text}rule = 'x'\n", PROJECT_FILE) == [
        "pyproject.toml:7: 'rule' is not a key of a model's entry. Did you mean 'rules'?"
    ]
    Path(MANIFEST_NAME).write_text('[[model]]\npath = "models/a.onnx"\n', "utf-8")
    assert [one.model for one in load_entries()] == ["models/a.onnx"]


def test_no_manifest(here):
    """Without a manifest, or with a pyproject.toml of others, it is said what to name."""
    with pytest.raises(UsageError, match=r"graphquant\.toml or pyproject\.toml"):
        load_entries()
    Path(PROJECT_FILE).write_text("[project]\n", "utf-8")
    with pytest.raises(UsageError, match=r"graphquant\.toml"):
        load_entries()
    with pytest.raises(UsageError, match=r"pyproject\.toml has no table \[tool\.graphquant\]"):
        load_entries([PROJECT_FILE])
    with pytest.raises(UsageError, match=r"There is no manifest no\.toml"):
        load_entries(["no.toml"])


def test_all_mistakes_of_values_at_once(here):
    """Each wrong key and value has its line, and the nearest of what was meant."""
    lines = mistakes(
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


def test_all_mistakes_of_models_at_once(here):
    """Names that name nothing, data, statistics and rules that are not there, and clashes come together, by line."""
    Path("bad.toml").write_text("a = 1\nb = 2\n", "utf-8")
    told = mistakes(
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
    assert_mistakes(told, expected)
    assert told[6].endswith("Did you mean 'stem'?")


def test_key_mistakes_do_not_hide_others(here):
    """Wrong keys, globs that name nothing, data and rules that are not there: all of it is told the first time."""
    Path("bad.toml").write_text("a = 1\n", "utf-8")
    told = mistakes(
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
    assert_mistakes(told, expected)


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
def test_consequences_of_a_mistake_are_not_reported(here, text, line):
    """Who misspells a key is told that alone, and not what would be wrong without it."""
    (told,) = mistakes(text)
    assert told.startswith(f"graphquant.toml:{line}: ")


def test_outputs_that_clash(here):
    """Two entries cannot write one output, nor one into a SavedModel's folder, however the paths are spelled."""
    Path("link").symlink_to("models")
    assert mistakes(
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
    ) == [
        (
            "graphquant.toml:4: the output of models/a.onnx would be written into the folder of models/net,"
            " which is a model. Give another 'output', or exclude that model."
        ),
        (
            "graphquant.toml:4: models/net/all.onnx is the output of models/a.onnx and of models/deep/c.onnx."
            " Put {parent} into 'output'."
        ),
        (
            "graphquant.toml:4: the output of models/deep/c.onnx would be written into the folder of models/net,"
            " which is a model. Give another 'output', or exclude that model."
        ),
        (
            "graphquant.toml:8: the output of models/b.pb would be written over models/b.pb, which is a model."
            " Give another 'output', or exclude that model."
        ),
        (
            "graphquant.toml:16: models/net.quant is the output of models/net and of models/b.pb [other]."
            " Put {parent} into 'output'."
        ),
    ]


def test_a_gate_without_data(here):
    """A gate that is measured wants data, told where the gate is."""
    assert mistakes('[defaults]\nmin_sqnr = 20\n[[model]]\npath = "models/a.onnx"\n') == [
        "graphquant.toml:2: 'min_sqnr' needs data, and there is none for models/a.onnx. Add 'data'."
    ]


def test_no_models_and_no_toml(here):
    """An empty manifest, and what is none, are told as such."""
    assert mistakes("[defaults]\n") == [
        "graphquant.toml:1: the manifest has no models. Add some: [[model]] and path = 'models/*.onnx'."
    ]
    assert_mistakes(mistakes("path = models"), [("graphquant.toml:1", "column 8")])
    assert mistakes("[model]\npath = 'x'") == [
        "graphquant.toml:1: 'model' is a table; it must be an array. The heading of an entry is [[model]]."
    ]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["models/x.onnx"], "There is no model 'models/x.onnx'."),
        (["modls/*"], "'modls/*' names nothing. Did you mean 'models'?"),
        (["models/*.txt"], "'models/*.txt' names 1 files and folders, but no model to quantize."),
        (["models"], "models is a folder without saved_model.pb. Give models/* for the models in it."),
        (["models/notes.txt"], "models/notes.txt is not a model. Give a file with one of .onnx, "),
        (["models/" + "x" * 300], "models/xxx"),
        (["models/a.onx"], "There is no model 'models/a.onx'. Did you mean 'a.onnx'"),
    ],
)
def test_patterns_without_matches(here, names, says):
    """The command line is answered without a file's name, with what is nearest."""
    with pytest.raises(ManifestError) as caught:
        load_entries(names)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(("name", "says"), [("", "'path' is empty."), ("x" * 5000, "entry 2 of 'path' has more than")])
def test_invalid_names(here, name, says):
    """What cannot be a name at all is told too."""
    with pytest.raises(UsageError) as caught:
        load_entries(["models/a.onnx", name])
    assert says.removeprefix("'path'") in str(caught.value)


def test_the_character_nul(here):
    """It is told where it stands, whatever it is in."""
    assert mistakes('[defaults]\noutput = "a\\u0000b"\n[[model]]\npath = "models/a\\u0000*"\n') == [
        "graphquant.toml:2: a name cannot contain the character NUL.",
        "graphquant.toml:4: a name cannot contain the character NUL.",
    ]


def test_invalid_options(here):
    """An option's value is told as a manifest's would be."""
    with pytest.raises(UsageError, match="there is no method 'minmx'"):
        load_entries(["models/*"], {"method": "minmx"})


def test_addresses(here):
    """Models elsewhere are found through fsspec, with outputs beside them."""
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    try:
        for name in MODELS:
            system.pipe(f"/zoo/{name}", b"")
        found = load_entries(["memory://zoo/**/*"])
        assert [one.model for one in found] == [
            f"memory:///zoo/{name}" for name in ("a.onnx", "b.pb", "deep/c.onnx", "deep/keras.keras", "net")
        ]
        assert [one.output for one in found][-2:] == ["memory:///zoo/deep/keras.quant", "memory:///zoo/net.quant"]
        (one,) = load_entries(["memory://zoo/a.onnx"], {"output": "memory://out/{name}"})
        assert (one.model, one.output) == ("memory://zoo/a.onnx", "memory://out/a.onnx")
        with pytest.raises(ManifestError, match=r"There is no model 'memory://zoo/aa\.onnx'\. Did you mean 'a\.onnx'"):
            load_entries(["memory://zoo/aa.onnx"])
    finally:
        system.rm("/zoo", recursive=True)


def test_the_schema(here):
    """Editors are told the same: what is a manifest fits the schema, with all keys described."""
    made = manifest_schema()
    Draft202012Validator.check_schema(made)
    validator = Draft202012Validator(made)
    assert list(validator.iter_errors(tomllib.loads(FULL))) == []
    for wrong in (
        '[defaults]\nmethod = "x"',
        "[[model]]\nrules = 'x'",
        "[[model]]\npath = 3",
        "[defaults]\nmin_sqnr = 'x'",
    ):
        assert len(list(validator.iter_errors(tomllib.loads(wrong)))) == 1
    for name in ("EntrySettings", "ModelTable"):
        assert all(len(entry["description"]) > 10 for entry in made["$defs"][name]["properties"].values())
    json.dumps(made)


def test_docstrings_name_every_key():
    """Each key has its sentence."""
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
@given(defaults=_VALUES, own=_VALUES, over=_VALUES)
def test_layers(tmp_path_factory, defaults, own, over):
    """Each value comes from the command line, else the entry, else the defaults, else it is what it always is."""
    folder = tmp_path_factory.getbasetemp() / "layers"
    folder.mkdir(exist_ok=True)
    (folder / "a.onnx").touch()
    path = folder / MANIFEST_NAME
    rows = ["[defaults]", *_rows(defaults), "[[model]]", 'path = "a.onnx"', *_rows(own)]
    path.write_text("\n".join(rows), "utf-8")
    (one,) = load_entries([str(path)], over)
    wanted = {"samples": None, "method": None, "family": None, "include": (), "float_weights": False}
    wanted |= {"max_size": None, "check": False, **defaults, **own, **over}
    check = {True: "", False: None}.get(wanted.pop("check"), "onnxruntime")
    gates = Gates(max_size=wanted.pop("max_size"), check=check)
    assert {key: getattr(one, key) for key in wanted} == wanted
    assert one.gates == gates


def _rows(values):
    return [f"{key} = {json.dumps(value)}" for key, value in values.items()]


@settings(max_examples=60, deadline=None)
@given(
    files=st.lists(st.text("ab.", min_size=1, max_size=3).map(lambda text: f"x{text}x.onnx"), max_size=6, unique=True),
    globs=st.lists(st.sampled_from(["x*", "*.onnx", "xa*", "**/*", "xab*x.onnx", "x[ab]*"]), min_size=1, max_size=3),
    picked=st.randoms(use_true_random=False),
)
def test_globs(tmp_path_factory, files, globs, picked):
    """Every model that one of the tables names is there once: with the first path's settings, else the first glob's."""
    folder = Path(tmp_path_factory.mktemp("globs"))
    for name in files:
        (folder / name).touch()
    named = [*globs, *picked.sample(files, min(2, len(files)))]
    picked.shuffle(named)
    tables = [f"[[model]]\npath = {json.dumps(name)}\nsamples = {place + 1}" for place, name in enumerate(named)]
    path = folder / MANIFEST_NAME
    path.write_text("\n".join(tables), "utf-8")
    expected = {}
    for exact in (True, False):
        for place, name in enumerate(named):
            for file in files:
                if exact == (name in files) and (PurePosixPath(file).match(name.replace("**/", ""))):
                    expected.setdefault(file, place + 1)
    unmatched = [
        name for name in named if not any(PurePosixPath(file).match(name.replace("**/", "")) for file in files)
    ]
    if unmatched:
        with pytest.raises(ManifestError) as caught:
            load_entries([str(path)])
        assert len(str(caught.value).split("\n")) == len(unmatched)
    else:
        assert [(one.name, one.samples) for one in load_entries([str(path)])] == sorted(
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
    """Whatever stands in a manifest, it is entries or a list of mistakes, each a line with its place."""
    path = tmp_path_factory.getbasetemp() / f"any-{random.Random(text).getrandbits(32)}.toml"  # noqa: S311  # a name
    path.write_text(text, "utf-8")
    try:
        told = load_entries([str(path)]) and []
    except ManifestError as error:
        told = str(error).split("\n")
    path.unlink()
    assert [line for line in told if not line.startswith(f"{path}:")] == []


def test_only_set_keys_are_returned():
    """Only keys that were given are settings."""
    assert set_keys(EntrySettings(samples=3, check=False)) == {"samples": 3, "check": False}


def test_every_option_of_insert_exists():
    """A manifest and its entries have each option of `insert`, or a reason why not."""
    options = {option.name for option in option_fields(InsertOptions)}
    settings = {setting.name for setting in dataclasses.fields(EntrySettings)}
    entry = {setting.name for kind in (Entry, Gates) for setting in dataclasses.fields(kind)}
    assert options - settings == OMITTED_OPTIONS.keys()
    assert settings <= entry
    assert all(OMITTED_OPTIONS.values())
