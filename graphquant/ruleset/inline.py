"""A rule in one line: the fixed-point recipe, `PRODUCER > CONSUMER: BITS, EXPONENT`, where a file would be named."""

from __future__ import annotations

import re
from typing import Any

SIGN = " > "
"""What tells such a rule from the name of a file."""

_RULE = re.compile(
    r"\s*(?P<producer>.+?)\s+>\s+(?P<consumer>.+?)\s*:\s*(?P<bits>\d{1,3})\s*,\s*(?P<exponent>-?\d{1,4})\s*"
)


def read_inline(text: str) -> dict[str, Any]:
    """The data of a rule file with the one rule that `text` says; a ValueError if it says none."""
    found = _RULE.fullmatch(text)
    if found is None:
        raise ValueError(
            "this is no rule in one line. Those read 'PRODUCER > CONSUMER: BITS, EXPONENT', as in"
            " 'conv1/Relu:0 > conv2/*: 8, -4'."
        )
    observe = {"name": "fixed-point", "exponent": int(found["exponent"])}
    rule = {
        "name": "fixed-point",
        "producer": {"name": found["producer"]},
        "consumer": {"name": found["consumer"]},
        "quantize": "fixed-point",
    }
    return {
        "scheme": {"fixed-point": {"bits": int(found["bits"]), "narrow": True, "observe": observe}},
        "rule": [rule],
    }
