"""Lines of keys in TOML text."""

import sys
import time
from pathlib import Path

import pytest

from graphquant.rules.load import RULE_FILE_KIND
from graphquant.rules.toml_document import MAX_NESTING, NestingError, locate_keys, nearest_line, parse_document

TEXT = '''\
# a comment [not.a.table]
description = """
[rule]
name = "no key"
"""  # = [ {
prepare = [ # [
  "a", "b]",

  'c', 1.5]
[scheme."a.b"]
observe.name = "fixed"
observe."l\\u006fw" = { x = [1,
  2, { y = 3 }], z = 1979-05-27 }
[[rule]]
name = 'x # "'
[rule.producer]
kind = "conv"
[[rule]]
consumer = { attr = { a = 1 } }
[[rule.part]]
[[rule.part]]
last.key = 1
'''

LINES = {
    ("description",): 2,
    ("prepare",): 6,
    ("prepare", 0): 7,
    ("prepare", 1): 7,
    ("prepare", 2): 9,
    ("prepare", 3): 9,
    ("scheme",): 10,
    ("scheme", "a.b"): 10,
    ("scheme", "a.b", "observe"): 11,
    ("scheme", "a.b", "observe", "name"): 11,
    ("scheme", "a.b", "observe", "low"): 12,
    ("scheme", "a.b", "observe", "low", "x"): 12,
    ("scheme", "a.b", "observe", "low", "x", 0): 12,
    ("scheme", "a.b", "observe", "low", "x", 1): 13,
    ("scheme", "a.b", "observe", "low", "x", 2): 13,
    ("scheme", "a.b", "observe", "low", "x", 2, "y"): 13,
    ("scheme", "a.b", "observe", "low", "z"): 13,
    ("rule",): 14,
    ("rule", 0): 14,
    ("rule", 0, "name"): 15,
    ("rule", 0, "producer"): 16,
    ("rule", 0, "producer", "kind"): 17,
    ("rule", 1): 18,
    ("rule", 1, "consumer"): 19,
    ("rule", 1, "consumer", "attr"): 19,
    ("rule", 1, "consumer", "attr", "a"): 19,
    ("rule", 1, "part"): 20,
    ("rule", 1, "part", 0): 20,
    ("rule", 1, "part", 1): 21,
    ("rule", 1, "part", 1, "last"): 22,
    ("rule", 1, "part", 1, "last", "key"): 22,
}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lines_of_every_key(newline):
    """Comments, strings over several lines, inline tables and dotted keys do not confuse the locator."""
    assert locate_keys(TEXT.replace("\n", newline)) == LINES


def test_a_table_stands_where_its_own_header_is():
    """A longer header above implies a table; its own header is where it is looked for."""
    lines = locate_keys("[scheme.a.observe]\nname = 'x'\n[scheme.a]\nbits = 8\n")
    assert lines["scheme", "a"] == 3
    assert lines["scheme", "a", "observe"] == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [(("rule", 1, "name"), 18), (("scheme", "a.b", "observe", "low", "x", 9, "q"), 12), (("pattern", "p"), 1), ((), 1)],
)
def test_nearest_falls_back_to_the_table_around(path, line):
    """A value without a line of its own gets the line of the innermost table around it."""
    assert nearest_line(lambda: LINES, path) == line


@pytest.mark.parametrize(
    "text",
    [
        "",
        '"',
        "[",
        "[[",
        "[a",
        "{",
        "}",
        "a={",
        "a=[",
        "a=[}",
        "a={]",
        "a.=1",
        "=1",
        "a==1",
        '"""\\',
        "a = 1 = 2",
        "'a\n= [",
        ",",
    ],
)
def test_invalid_text_is_passed_over(text):
    """The locator answers for text that is no TOML, too."""
    assert all(1 <= line <= text.count("\n") + 1 for line in locate_keys(text).values())


@pytest.mark.parametrize(
    "text",
    [
        "\na = " + "[" * 100_000,
        "\n" + "a." * 100_000 + "b = 1",
        "\n[" + "a." * 100_000 + "b]",
        "\nx = " + "{a=" * 100_000,
    ],
)
def test_deep_nesting_is_refused(text):
    """Nesting is bounded before tomllib, which takes quadratic time or recurses, sees the text."""
    with pytest.raises(NestingError, match=f" {MAX_NESTING} levels") as caught:
        locate_keys(text)
    assert caught.value.line == 2


@pytest.mark.parametrize("part", ['"""\\"""', "a=[[],[]]\n", "= ", "[[a]]\n", "'''\\''' "])
def test_time_is_linear(part):
    """Half a megabyte of anything is scanned in seconds."""
    start = time.process_time()
    locate_keys(part * (500_000 // len(part)))
    assert time.process_time() - start < 20  # time of this process alone, which other processes do not change


def test_lines_are_computed_on_first_access(monkeypatch) -> None:
    """A text in which nothing is wrong is not gone through for them; asked, they are those of `locate`."""
    text = "[scheme.a]\nbits = 8\n\n[[rule]]\nname = 'x'\n"
    located: list[str] = []
    monkeypatch.setattr(
        sys.modules[parse_document.__module__], "locate_keys", lambda given: located.append(given) or locate_keys(given)
    )
    _, locate = parse_document(Path("a.toml"), text.encode(), RULE_FILE_KIND)
    assert not located
    assert locate() == locate_keys(text)
    assert nearest_line(locate, ("rule", 0, "producer")) == 4
    assert located == [text]
