"""What a comparison of two models gives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from graphquant.drawn import Drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFigures:
    """An output over all samples.

    Attributes:
        name: Its name in the float model.
        other: Its name in the quantized one.
        sqnr: Signal to noise in dB, infinite where nothing differs; None where it does not hold floats.
        cosine: Of the angle between both, as vectors; None likewise.
        largest: The largest difference of two values.
        agreement: Share of rows whose largest value is at the same place, or of integers that are equal; None where
            neither can be said.
        rows: How many rows or integers that is a share of.
        values: How many values were compared; none where it was empty for all samples.
        accuracy: Share of rows whose largest value is where the label says, of the float model and of the quantized
            one; None without labels.
        problem: Why the two could not be compared, "" if they could.
        least_sqnr: What SQNR is at least, were it the best of a search's plans, with 95% confidence, as far as these
            samples stand for all; minus infinity where they are too few to say, None where it does not hold floats.
        half: How many samples, the worst first, make half of the error.
        least_agreement: Of agreement, as of SQNR.
        most_lost: The share of rows that are right at most less in the quantized model, likewise; None without labels.
    """

    name: str
    other: str
    sqnr: float | None
    cosine: float | None
    largest: float
    agreement: float | None
    rows: int
    values: int
    accuracy: tuple[float, float] | None
    problem: str
    least_sqnr: float | None = None
    half: int = 0
    least_agreement: float | None = None
    most_lost: float | None = None

    @property
    def empty(self) -> bool:
        """Whether there was nothing to compare."""
        return not self.values and not self.problem


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFigures:
    """A quantized tensor.

    Attributes:
        graph: Its graph, "" for the main one.
        op: The quantization op.
        tensor: What it quantizes.
        rule: The rule that inserted it, "" if that is not known.
        parameter: Whether it is a weight.
        local: What this quantization alone does to the values it gets, dB of SQNR; None if that is not known.
        accumulated: What this and all before it did to the float model's values, dB of SQNR; None if not known.
        blame: What it does alone to the worst output, dB of SQNR; None if that was not measured.
        bias: Whether it makes the 32 bits that are added to a sum of products; steps are those of the sum, so that what
            a small bias loses is nothing to the sum.
        note: Why a figure is not known, "" if both are.
    """

    graph: str
    op: str
    tensor: str
    rule: str
    parameter: bool
    local: float | None
    accumulated: float | None
    blame: float | None = None
    bias: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Drawn):
    """Two models on the same data.

    Attributes:
        samples: How many samples were run.
        random: Whether they were made up.
        outputs: Figures of each output.
        sites: Figures of each quantized tensor, the largest local error first, or the largest blame.
        labels: The key of the data that has labels, "" if there is none.
    """

    samples: int
    random: bool
    outputs: tuple[OutputFigures, ...]
    sites: tuple[SiteFigures, ...]
    labels: str

    @property
    def nothing(self) -> bool:
        """Whether no output had any value to compare."""
        return bool(self.outputs) and all(one.empty for one in self.outputs)

    @property
    def sqnr(self) -> float | None:
        """That of the worst output; None where no output holds floats."""
        if any(one.problem for one in self.outputs):
            return -math.inf
        return min((one.sqnr for one in self.outputs if one.sqnr is not None), default=None)

    @property
    def agreement(self) -> float | None:
        """That of the worst output; None where no output has one."""
        if any(one.problem for one in self.outputs):
            return 0.0
        return min((one.agreement for one in self.outputs if one.agreement is not None), default=None)


__all__ = ["Comparison", "OutputFigures", "SiteFigures"]
