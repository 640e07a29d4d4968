"""What an explanation tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphquant.backends import Verdict
    from graphquant.ir import TensorRef, Use
    from graphquant.match import Miss


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What was tried for one use of one tensor.

    Attributes:
        tensor: The tensor.
        use: The consumer.
        quantized: Whether the consumer reads it quantized.
        winner: Name of the rule that claimed the use, "" if none did.
        outcome: What will be done, or was, in words.
        choices: Why its scale is what it is, in sentences.
        misses: The other rules in order, each with the condition that failed; "" where a rule before it was first. None
            of a model that is written already.
        asked: The op of this use that was asked for: what makes the tensor, or what reads it.
        absorbed: Whether the plan's backend runs what makes the tensor and what reads it as one op.
    """

    tensor: TensorRef
    use: Use
    quantized: bool
    winner: str
    outcome: str
    choices: tuple[str, ...] = ()
    misses: tuple[Miss, ...]
    asked: tuple[str, str]
    absorbed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """All that is known of the tensor or op that was asked for.

    Attributes:
        uses: Each use that it makes or offers.
        verdicts: How the backend runs the ops that were asked for.
        backend: The backend, "" where none is meant.
        assumed: Whether that was foretold with made-up ranges, for want of data.
        written: Whether the model was quantized already, and what is told is what is in it.
        untold: Why nothing is told of rules that came close, "" where it is.
    """

    uses: tuple[Explanation, ...]
    verdicts: tuple[Verdict, ...] = ()
    backend: str = ""
    assumed: bool = False
    written: bool = False
    untold: str = ""


__all__ = ["Explained", "Explanation"]
