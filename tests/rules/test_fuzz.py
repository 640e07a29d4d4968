"""Whatever stands in a rule file, it is a rule set or a list of mistakes."""

import os
import re
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from graphquant.errors import RuleError
from graphquant.rules import RuleSet, load_ruleset, rule_file_schema, shipped_rule_files
from graphquant.rules.load import RULE_FILE_KIND

SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

WORDS = sorted({key for table in RULE_FILE_KIND.tables.values() for key in RULE_FILE_KIND.keys(table)})
VALUES = [
    *('""', '"x"', "3", "-1", "true", "nan", "inf", "1e400", "1979-05-27", "07:32:00", "0x" + "f" * 100),
    *("[]", "{}", "[[]]", "[1, 'a', {}]", "{a = {b = 1}}", '["y = relu(x)"]', "[", "{", '"', "="),
    *('"conv"', '"conv > relu?"', '"weight"', '"float"', '"fixed"', '"int8"', '"silu.s"'),
    *('"/(/"', '"/a{9999999999}/"', '"\\u2028\\u0000"', '"""\n\n"""', "'''a'''"),
]

key = st.sampled_from([*WORDS, "zz", '"a b"', "name.x", "''"])
value = st.recursive(
    st.sampled_from(VALUES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.dictionaries(key, inner, max_size=4).map(
            lambda items: f"{{{', '.join(f'{name} = {item}' for name, item in items.items())}}}"
        ),
    ),
    max_leaves=6,
)
header = st.builds(
    "{}{}{}".format,
    st.sampled_from(["[", "[["]),
    st.lists(
        st.sampled_from(["rule", "scheme", "pattern", "w", "consumer", "observe", "attr", '"a.b"']),
        min_size=1,
        max_size=4,
    ).map(".".join),
    st.sampled_from(["]", "]]"]),
)
line = st.one_of(header, st.builds("{} = {}".format, key, value), st.text(max_size=8))
VALIDATOR = Draft202012Validator(rule_file_schema())
SEEDS = [path.read_bytes() for path in shipped_rule_files().values()]


@pytest.fixture(scope="module")
def short_folder():
    """A working directory with a short name, so that paths in messages are simple."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        yield
        os.chdir(before)


def outcome(content):
    """Loads `content`: a rule set, which the schema takes too, or one mistake a line and nothing else."""
    Path("f.toml").write_bytes(content)
    try:
        assert isinstance(load_ruleset(["f.toml"]), RuleSet)
        assert VALIDATOR.is_valid(tomllib.loads(content.decode("utf-8-sig")))
    except RuleError as error:
        last = 1
        for message in str(error).split("\n"):
            match = re.fullmatch(r"f\.toml:(\d+): .+[.?]", message)
            assert match, message
            assert message.isprintable()
            assert last <= int(match[1]) <= content.count(b"\n") + 1
            last = int(match[1])


@SETTINGS
@given(st.lists(line, max_size=12).map("\n".join))
def test_random_tables(short_folder, text):
    """Tables with keys in the wrong places and values of all types give a rule set or mistakes."""
    outcome(text.encode("utf-8", "surrogatepass"))


@SETTINGS
@given(st.binary(max_size=200))
def test_random_bytes(short_folder, content):
    """Any bytes give a rule set or mistakes."""
    outcome(content)


@SETTINGS
@given(
    st.sampled_from(SEEDS),
    st.lists(
        st.tuples(
            st.floats(0, 1),
            st.integers(0, 12),
            st.one_of(st.binary(max_size=3), st.sampled_from(VALUES).map(str.encode)),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_mutated_files(short_folder, content, edits):
    """A shipped file with a few bytes replaced gives a rule set or mistakes."""
    for where, length, new in edits:
        at = int(where * len(content))
        content = content[:at] + new + content[at + length :]
    outcome(content)


@pytest.mark.slow
@SETTINGS
@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.floats(0, 1), key, value), min_size=1, max_size=3))
def test_replaced_lines(short_folder, content, edits):
    """A shipped file with assignments replaced gives a rule set or mistakes."""
    lines = content.decode().split("\n")
    for where, name, new in edits:
        lines[int(where * (len(lines) - 1))] = f"{name} = {new}"
    outcome("\n".join(lines).encode())
