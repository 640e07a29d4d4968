"""Messages for a rule file with every kind of mistake."""

from pathlib import Path

import pytest

from graphquant.errors import RuleError
from graphquant.rules import load_ruleset

BAD_RULE_FILE = '''\
description = 3
prepare = ["fold-batchnorm", "fold-batchnrm"]
rules = "x"

[scheme.weight]
dtype = "int8"
bits = 8
per = "channel"

[scheme.act]
per = "chanel"
zero = true
obsrve = "minmax"
bits = 64
narrow = 1

[scheme.dt]
dtype = "itn8"
observe = "minmx"
family = "fake-quants"

[scheme.fixed]
name = "fixed"
observe = { name = "fixed", low = 0 }

[scheme.float]
signed = "yes"

[pattern.silu]
ops = ["s = sigmoid(x)", "y = mull(x, s)"]

[pattern.ok]
ops = [
  "s = sigmoid(x)",  # [[rule]]
  "y = mul(x, s)",
]

[pattern."a.b"]
ops = []

[[rule]]
name = "one"
producer = { kind = "cnov" }
consumer = { input = "wieght", max_rank = -1 }
quantize = "wight"

[[rule]]
name = "one"
why = """
[[rule]]
quantize = 3
"""
quantize = "float"

[[rule]]
name = "no quantize"
producer.pattern = "okk"

[[rule]]
name = "three"
quantize = "float"
optional = "true"
[rule.producer]
kind = "conv > > relu"
pattern = "ok.z"
name = "/a(/"
[rule.consumer]
kind = 3
attr = { strides = [1, 2], pads = 1979-05-27 }

[[rule]]
name = "four"
quantize = "float"
insert_in = "bdy"

[[rule]]
name = "six"
quantize = "float"
producer = { input = "weight", kind = "conv" }

[[rule]]
name = "five"
quantize = "float"
consumer = { kind = "conv", min_rank = 4, max_rank = 2, attr = { } }
'''

EXPECTED_MESSAGES = """\
bad.toml:1: 'description' is 3; it must be a string.
bad.toml:2: there is no step 'fold-batchnrm'. Did you mean 'fold-batchnorm' or 'inference-batchnorm'?
bad.toml:3: 'rules' is not a key of a rule file. Did you mean 'rule' or 'use'?
bad.toml:5: 'dtype' replaces 'bits' and 'signed'; give one or the other.
bad.toml:11: 'per' is 'chanel'; it must be 'tensor', 'channel' or 'block'. Did you mean 'channel'?
bad.toml:12: 'zero' is true; it must be 'symmetric' or 'asymmetric'.
bad.toml:13: 'obsrve' is not a key of a scheme. Did you mean 'observe'?
bad.toml:14: 'bits' is 64; it must be at most 32.
bad.toml:15: 'narrow' is 1; it must be true or false.
bad.toml:18: 'itn8' is no data type; use int2 to int32, uint2 to uint32, float8_e4m3fn, float8_e5m2 and \\
float4_e2m1fn. Did you mean 'int8' or 'uint8' or 'int28'?
bad.toml:19: there is no observer 'minmx'. Did you mean 'minmax' or 'mean-minmax'?
bad.toml:20: there is no family 'fake-quants'. Did you mean 'fake-quant'?
bad.toml:23: 'name' is not a key of a scheme. The header [scheme.NAME] names it.
bad.toml:24: the observer 'fixed' needs 'high'; give it a number.
bad.toml:26: 'float' is not a valid name for a scheme. Choose another name.
bad.toml:27: 'signed' is 'yes'; it must be true or false.
bad.toml:30: there is no kind 'mull'. Did you mean 'mul' or 'matmul' or 'call'?
bad.toml:38: 'a.b' is not a valid name for a pattern. Use letters, digits, '_' and '-'.
bad.toml:39: 'ops' is empty. Remove it or fill it.
bad.toml:43: there is no kind 'cnov'. Did you mean 'conv' or 'scan'?
bad.toml:44: there is no input role 'wieght'. Did you mean 'weight'?
bad.toml:44: 'max_rank' is -1; it must be at least 0.
bad.toml:45: there is no scheme 'wight'. Did you mean 'weight'?
bad.toml:47: the rule has no condition; give it a 'producer' or a 'consumer', kind = '*' for any op.
bad.toml:48: a rule above has the name 'one' already. Give each rule its own name.
bad.toml:55: a rule lacks the key 'quantize'. Its meaning: A scheme, "same-as-input", "passthrough", "fused" or "float".
bad.toml:56: 'name' is 'no quantize'; it must be letters, digits, '_', '-' and '.'.
bad.toml:57: there is no pattern 'okk'. Did you mean 'ok'?
bad.toml:62: 'optional' is 'true'; it must be true or false.
bad.toml:64: '' in 'conv > > relu' is no kind; write 'conv', 'conv|matmul' or 'conv > relu?'.
bad.toml:65: the pattern 'ok' has no op 'z'. Its ops are s, y.
bad.toml:66: '/a(/' is no valid regular expression (missing ): a(); a name without slashes is a glob.
bad.toml:68: 'kind' is 3; it must be a string.
bad.toml:69: the attribute 'pads' can only be compared with strings, numbers and booleans.
bad.toml:74: 'insert_in' is 'bdy'; it must be 'producer' or 'body'. Did you mean 'body'?
bad.toml:76: 'input' is a condition on the consumer; move it to 'consumer'.
bad.toml:84: 'min_rank' 4 is above 'max_rank' 2; nothing can match.
"""


@pytest.fixture
def said(tmp_path, monkeypatch):
    """Gives the lines that a rule file's text is answered with."""
    monkeypatch.chdir(tmp_path)

    def said(text):
        Path("bad.toml").write_text(text, encoding="utf-8")
        with pytest.raises(RuleError) as caught:
            load_ruleset(["bad.toml"])
        return str(caught.value)

    return said


def test_all_mistakes_at_once(said):
    """Every mistake of a file is told at its line, in its order, with what was meant."""
    assert said(BAD_RULE_FILE) + "\n" == EXPECTED_MESSAGES.replace(" \\\n", " ")


RULE = "[[rule]]\nname = 'a'\nquantize = 'float'\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rule = {}", "1: 'rule' is a table; it must be an array. The header of a rule is [[rule]]."),
        ("[rule]\nname = 'a'", "1: 'rule' is a table; it must be an array. The header of a rule is [[rule]]."),
        ("rule = [3]", "1: entry 1 of 'rule' is 3; it must be a table. The header of a rule is [[rule]]."),
        ("scheme = []", "1: 'scheme' is an array; it must be a table. The header of a scheme is [scheme.NAME]."),
        ("[scheme]\nbits = 3", "2: 'bits' is 3; it must be a table. The header of a scheme is [scheme.NAME]."),
        (
            "pattern = 2020-01-01",
            "1: 'pattern' is a date or time; it must be a table. The header of a pattern is [pattern.NAME].",
        ),
        ("description = ['x']", "1: 'description' is an array; it must be a string."),
        ("prepare = {a = 1}", "1: 'prepare' is a table; it must be an array."),
        ("[scheme.a]\nbits = 1.5", "2: 'bits' is 1.5; it must be a whole number."),
        ("[scheme.a]\nbits = 0x" + "f" * 9999, "2: 'bits' is a very large number; it must be at most 32."),
        ("[scheme.a]\ndtype = ''", "2: 'dtype' is empty. Remove it or fill it."),
        ("[scheme.a]\nobserve = 3", "2: 'observe' is 3; it must be a table."),
        (
            "[scheme.a]\nobserve = {low = 1}",
            "2: an observer lacks the key 'name'. Its meaning: An observer of `graphquant.observers.OBSERVERS`.",
        ),
        ("[scheme.a]\nobserve = 'fixed-point'", "2: the observer 'fixed-point' needs 'exponent'; give it a number."),
        (
            "[scheme.a]\nobserve.name = 'minmax'\nobserve.low = nan",
            "2: the observer 'minmax' has no 'low'; it takes no argument.",
        ),
        (RULE + "producer = 'conv'", "4: 'producer' is 'conv'; it must be a table."),
        (RULE + "consumer = {kind = ''}", "4: 'kind' is empty. Remove it or fill it."),
        (RULE + "consumer = {type = 'Conv,Gemm'}", "4: 'Conv,Gemm' is not an op type; write 'Conv' or 'Conv|Gemm'."),
        (RULE + "consumer = {name = '" + "a" * 501 + "'}", "4: 'name' has more than 500 characters. Make it shorter."),
        (
            RULE + "consumer = {pattern = 'silu'}",
            "4: there is no pattern 'silu'. The file has none, and uses no library with patterns.",
        ),
        (RULE + "consumer = {input = 'weight|'}", "4: there is no input role ''. Use one of "),
        (RULE + "consumer = {kind = 'quux'}", "4: there is no kind 'quux'. Use one of *, abs, add, "),
        (RULE + "consumer = {readers = 2}", "1: 'readers' is a condition on the producer; move it to 'producer'."),
        ("[pattern.a]\nops = ['y = relu(x)', 3]", "2: entry 2 of 'ops' is 3; it must be a string."),
        ("[pattern.a]\nops = ['a', 'b']", "2: 'a' does not have the form 'name = kind(operand, ...)'."),
        ("[pattern.a]\nops = [" + "'y = relu(x)'," * 33 + "]", "2: 'ops' has more than 32 entries. Make it shorter."),
    ],
)
def test_one_mistake(said, text, line):
    """Any value a user may write gets one readable line."""
    answer = said(text)
    assert answer.startswith(f"bad.toml:{line}")
    assert "\n" not in answer


def test_allowed(tmp_path):
    """A scheme that no rule uses is no mistake, nor are attributes of all plain types and kind = '*'."""
    path = tmp_path / "good.toml"
    path.write_text(
        "[scheme.spare]\nobserve = 'absmax'\n" + RULE + "consumer = {kind = '*', type = 'Conv|com.microsoft.QGemm', "
        "attr = {a = [[1, 2], [3]], b = 1.5, c = 'x', d = true}}",
        encoding="utf-8",
    )
    (bound,) = load_ruleset([str(path)]).rules
    assert bound.rule.consumer.attr == {"a": [[1, 2], [3]], "b": 1.5, "c": "x", "d": True}
