"""Finding and loading rule files."""

import hashlib
import os
import re
from pathlib import Path

import pytest

import graphquant
from graphquant.errors import RuleError, UsageError
from graphquant.quantize.prepare import PREPARATION_STEPS
from graphquant.rules import find_rule_file, load_ruleset, shipped_rule_files
from graphquant.rules.rule import PREPARATION_NAMES

GOOD = """\
prepare = ["fold-batchnorm"]

[scheme.weight]
dtype = "int8"

[pattern.silu]
ops = ["s = sigmoid(x)", "y = mul(x, s)"]

[[rule]]
name = "weight"
producer = { kind = "parameter" }
quantize = "weight"

[[rule]]
name = "inside"
consumer = { pattern = "silu.s" }
quantize = "float"
"""


@pytest.fixture
def write_rule_files(tmp_path, monkeypatch):
    """Writes rule files into an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def write(content, name="rules.toml"):
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
        return name

    return write


def rule_error_text(*names):
    """Return the error text of loading these files."""
    with pytest.raises(RuleError) as caught:
        load_ruleset(names)
    return str(caught.value)


def test_shipped_rules_of_a_checkout():
    """In a checkout the shipped rules are the folder beside the package, by name."""
    folder = Path(graphquant.__file__).parent.parent / "rules"
    assert shipped_rule_files() == {path.stem: path for path in sorted(folder.glob("*.toml"))}
    assert find_rule_file("onnxruntime") == folder / "onnxruntime.toml"


@pytest.mark.parametrize("name", sorted(shipped_rule_files()))
def test_shipped_rules_load(name):
    """Every shipped rule file is free of mistakes, and its description is one line."""
    ruleset = load_ruleset([name])
    assert ruleset.files == (name,)
    assert ruleset.rules
    base = {"tflite16": "tflite", "w4a8": "weight_only_int4"}.get(name, name)
    assert {rule.file for rule in ruleset.rules} - {name, "weights"} == {base} - {name}


def test_load(write_rule_files):
    """A rule comes with its file, line, scheme and patterns."""
    ruleset = load_ruleset([write_rule_files(GOOD)])
    weight, inside = ruleset.rules
    assert ruleset.files == ("rules.toml",)
    assert ruleset.prepare == ("fold-batchnorm",)
    assert (weight.rule.name, weight.file, weight.line) == ("weight", "rules.toml", 9)
    assert weight.scheme is not None
    assert (weight.scheme.name, weight.scheme.type.name) == ("weight", "int8")
    assert (inside.rule.name, inside.line, inside.scheme) == ("inside", 14, None)
    assert inside.patterns is weight.patterns
    assert inside.patterns["silu"].ops == ("s = sigmoid(x)", "y = mul(x, s)")


def test_files_stack_in_order(write_rule_files):
    """Rules keep the order of the files, prepare steps are listed once, a scheme is its own file's."""
    mine = GOOD.replace("fold-batchnorm", 'initializer-inputs", "fold-batchnorm').replace("int8", "int4")
    ruleset = load_ruleset([write_rule_files(mine, "mine.toml"), write_rule_files(GOOD)])
    assert [(rule.file, rule.scheme and rule.scheme.dtype) for rule in ruleset.rules] == [
        ("mine.toml", "int4"),
        ("mine.toml", None),
        ("rules.toml", "int8"),
        ("rules.toml", None),
    ]
    assert ruleset.prepare == ("initializer-inputs", "fold-batchnorm")


def test_the_first_file_that_names_a_step_decides(write_rule_files):
    """A file before others takes a step out by "not", one behind them cannot."""
    without = write_rule_files('prepare = ["not fold-batchnorm", "drop-identity"]\n', "without.toml")
    rules = write_rule_files(GOOD)
    assert load_ruleset([without, rules]).prepare == ("drop-identity",)
    assert load_ruleset([rules, without]).prepare == ("fold-batchnorm", "drop-identity")


def test_contradictory_steps_are_rejected(write_rule_files):
    """One file cannot want both."""
    with pytest.raises(RuleError, match=r"bad\.toml:1: 'fold-batchnorm' .*remove one"):
        load_ruleset([write_rule_files('prepare = ["fold-batchnorm", "not fold-batchnorm"]\n', "bad.toml")])


def test_step_names_match_the_implementations():
    """Rule files know every preparation, by the same name and in the same order."""
    assert tuple(PREPARATION_STEPS) == PREPARATION_NAMES


def test_digest_is_of_the_contents_in_order(write_rule_files):
    """The digest changes with a byte of a file and with the order, and with nothing else."""
    first, second = write_rule_files(GOOD, "one.toml"), write_rule_files(GOOD + "\n", "two.toml")
    digests = [hashlib.sha256(Path(name).read_bytes()).digest() for name in (first, second)]
    assert load_ruleset([first, second]).digest == hashlib.sha256(b"".join(digests)).hexdigest()
    assert load_ruleset([second, first]).digest != load_ruleset([first, second]).digest
    assert load_ruleset([first]).digest == load_ruleset([write_rule_files(GOOD, "copy.toml")]).digest


def test_no_files_and_an_empty_file(write_rule_files):
    """Nothing asked for is an empty rule set; so is an empty file."""
    assert load_ruleset([]).rules == ()
    assert load_ruleset([write_rule_files("")]).rules == ()


def test_byte_order_mark(write_rule_files):
    """A byte order mark, as some editors write it, is no mistake."""
    assert len(load_ruleset([write_rule_files(b"\xef\xbb\xbf" + GOOD.encode())]).rules) == 2


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("onnxruntme", ["'onnxruntime'"]),
        ("", []),
        ("..", []),
        ("mine", ["'mine.toml'"]),
        ("no/onnxruntime.toml", ["'onnxruntime'"]),
        ("nul\0.toml", []),
    ],
)
def test_unknown_names(write_rule_files, name, closest):
    """An unknown name is answered with the shipped ones and the closest of them."""
    write_rule_files("", "mine.toml")
    with pytest.raises(UsageError) as caught:
        load_ruleset([name])
    assert f" rule file {name!r}. " in str(caught.value)
    assert re.findall(r"Did you mean (.*?)\?", str(caught.value)) == closest
    assert f" {', '.join(shipped_rule_files())}. " in str(caught.value)


def test_unreadable_files(write_rule_files, monkeypatch):
    """A file that is no rule file at all is a mistake in line 1, or where it begins."""
    Path("folder.toml").mkdir()
    os.mkfifo("pipe.toml")
    assert re.match(r"folder\.toml:1: .*folder", rule_error_text("folder.toml"))
    assert re.match(r"pipe\.toml:1: .*regular file", rule_error_text("pipe.toml"))
    assert re.match(r"rules\.toml:3: .*UTF-8", rule_error_text(write_rule_files(b"a = 1\n\nb = '\xff'")))
    assert re.match(r"rules\.toml:1: .* 1048576 bytes", rule_error_text(write_rule_files(" " * (1 << 20) + " ")))
    for deep in (
        "a = " + "[" * 5000,
        "a." * 100_000 + "b = 1",
        "[" + "a." * 100_000 + "b]",
        "a = " + "[" * 40 + "]" * 40,
    ):
        assert re.match(r"rules\.toml:2: .* 16 levels", rule_error_text(write_rule_files(f"\n{deep}")))

    def refuse(*_args, **_keywords):
        raise PermissionError(13, "refused")

    monkeypatch.setattr(Path, "open", refuse)
    assert re.match(r"rules\.toml:1: .*\(refused\)", rule_error_text("rules.toml"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a = 1\nb = \n", r"2: .*TOML: .*column 5\."),
        ("a = 1\n\nb = [1,", r"3: .*TOML: Invalid value\."),
        ("a = 1\na = 2\n", r"2: .*TOML: .*overwrite .*column 6\."),
        ("kind = conv", r"1: .*TOML: .*column 8\..* kind = 'conv'\."),
        ("[a]\n[a]\n", r"2: .*TOML: .*\('a',\) .*column 3\."),
        ("a = " + "1" * 5000, r"1: .*TOML: Exceeds .*limit"),
    ],
)
def test_syntax_errors(write_rule_files, text, says):
    """A syntax error has tomllib's line and words."""
    assert re.match(rf"rules\.toml:{says}", rule_error_text(write_rule_files(text)))


def test_mistakes_of_all_files_in_order(write_rule_files):
    """Mistakes of all files come together, by file and line; a file named twice is told once."""
    bad = write_rule_files("b = 1\n\n[[rule]]\nname = 'x'\n", "b.toml")
    second = write_rule_files("\na = ", "a.toml")
    lines = rule_error_text(bad, write_rule_files(GOOD), second, bad).splitlines()
    assert [re.match(r"(\S+): (?:.*?('\w+'|TOML))?", line).groups() for line in lines] == [
        ("b.toml:1", "'b'"),
        ("b.toml:3", "'quantize'"),
        ("a.toml:2", "TOML"),
    ]


def test_texts(write_rule_files):
    """A text with more than one line is what a file of it would be; mistakes name its place."""
    from_text, from_file = load_ruleset([GOOD]), load_ruleset([write_rule_files(GOOD)])
    assert (from_text.digest, from_text.prepare, from_text.files) == (from_file.digest, from_file.prepare, (GOOD,))
    assert [(rule.file, rule.line, rule.rule) for rule in from_text.rules] == [
        ("rules[0]", rule.line, rule.rule) for rule in from_file.rules
    ]
    sentence = rule_error_text("rules.toml", "\n# a > b\nb = 1")
    keys = "description, target, prepare, algorithms, extends, use, costs, scheme, pattern, rule"
    assert re.fullmatch(rf"rules\[1\]:3: 'b' .* {keys}\.", sentence)
    assert re.match(r"rules\[0\]:1: .* 1048576 bytes", rule_error_text("\n" * ((1 << 20) + 1)))


def test_many_mistakes_are_cut(write_rule_files):
    """A hundred mistakes are told, then how many follow."""
    lines = rule_error_text(write_rule_files("".join(f"key{number} = 1\n" for number in range(1000)))).splitlines()
    assert len(lines) == 101
    assert lines[-1].startswith("rules.toml:101: and 900 more ")


def test_a_file_extends_a_shipped_one(tmp_path):
    """Its rules come first, its schemes replace those of the same name, and later files follow both."""
    path = tmp_path / "mine.toml"
    path.write_text(
        'extends = "tflite"\n[scheme.activation]\ndtype = "int16"\nzero = "symmetric"\nobserve = "absmax"\n'
        '[[rule]]\nname = "first"\nproducer = { name = "x" }\nquantize = "activation"\n'
    )
    base = load_ruleset(["tflite"])
    ruleset = load_ruleset([str(path), "generic"])
    assert [bound.file for bound in ruleset.rules[:2]] == [str(path), "tflite"]
    assert [bound.rule.name for bound in ruleset.rules[1 : len(base.rules) + 1]] == [
        bound.rule.name for bound in base.rules
    ]
    assert ruleset.rules[len(base.rules) + 1].file == "generic"
    by_scheme = {bound.rule.quantize: bound.scheme for bound in ruleset.rules[: len(base.rules) + 1]}
    assert (by_scheme["activation"].type.name, by_scheme["weight"].type.name) == ("int16", "int8")
    assert ruleset.prepare[: len(base.prepare)] == base.prepare
    path.write_text('extends = "tflit"\n')
    assert "tflite" in rule_error_text(str(path))


def test_strange_characters_stay_on_their_line(write_rule_files):
    """No value or key can break the one line of its mistake."""
    sentence = rule_error_text(
        write_rule_files(
            '"a\\nb\\u2028c\\u001b" = 1\n[[rule]]\nname = "a"\nquantize = "b\\nc"\nproducer = { name = "/(?\\n/" }\n'
        )
    )
    assert [line.partition(" ")[0] for line in sentence.split("\n")] == [
        "rules.toml:1:",
        "rules.toml:4:",
        "rules.toml:5:",
    ]
    assert sentence.replace("\n", "").isprintable()
