"""The plan as data: which tensors are quantized for which consumers, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from graphquant.drawn import Drawn

# pydantic reads the annotations when it checks a plan's JSON.
from graphquant.ir import TensorRef, Use  # noqa: TC001
from graphquant.numerics import LARGEST_VALUE, SMALLEST_SCALE, FloatType
from graphquant.prepare import Step  # noqa: TC001
from graphquant.ruleset import CORRECTIONS, Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One tensor that gets a quantize-dequantize pair for some of its consumers.

    Attributes:
        tensor: What is quantized.
        uses: The consumers that are rerouted.
        graph: The graph that gets the new ops: the tensor's own, or the body that reads it.
        scheme: How it is quantized.
        axis: The channel axis of a per-channel scheme, or that of the blocks; None per tensor.
        view: The shape in which `axis` is the channel axis, where it is not the tensor's own: a depthwise kernel
            [3, 3, 4, 2] has 8 channels as [3, 3, 8].
        rule: Name of the rule that claimed the uses.
        why: That rule's reason.
        parameter: Whether the tensor is a weight, so that its range comes from its value.
        tie: Uses whose sites must have the same scale and zero point as this one ("same-as-input").
        twin: A use whose site this one has the scale of: the same computation in the graphs that run, of which this is
            a copy that no data reaches.
        range: (low, high) in real units, which wins over statistics.
        scale: One scale, or one per channel; with `zero_point` it wins over everything.
        zero_point: One zero point, or one per channel.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    tensor: TensorRef
    uses: tuple[Use, ...]
    graph: str
    scheme: Scheme
    axis: int | None = None
    view: tuple[int, ...] | None = None
    rule: str = ""
    why: str = ""
    parameter: bool = False
    tie: tuple[Use, ...] = ()
    twin: Use | None = None
    range: tuple[float, float] | None = None
    scale: tuple[float, ...] | None = None
    zero_point: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Checks what an edited plan may get wrong by itself; what needs the model is `check_plan`'s."""
        if self.range is not None and not (all(map(math.isfinite, self.range)) and self.range[0] <= self.range[1]):
            raise ValueError("'range' is (low, high), finite and in that order")
        if self.zero_point is not None and (self.scale is None or len(self.scale) != len(self.zero_point)):
            raise ValueError("'zero_point' goes with as many numbers in 'scale'")
        if self.scale is not None:
            self._check_scale(self.scale)
        qmin, qmax = self.scheme.type.limits(narrow=self.scheme.narrow)
        if isinstance(self.scheme.type, FloatType):
            qmin = qmax = 0
        if not all(qmin <= zero <= qmax for zero in self.zero_point or ()):
            raise ValueError(f"'zero_point' is not in [{qmin}, {qmax}]")

    def _check_scale(self, scale: tuple[float, ...]) -> None:
        if self.scheme.block_size is not None:
            raise ValueError("'scale' cannot be given for each block; give 'range'")
        if not scale or (self.axis is None and len(scale) != 1):
            raise ValueError("'scale' holds one number, or one per channel with an 'axis'")
        if not all(SMALLEST_SCALE <= one <= LARGEST_VALUE for one in scale):
            raise ValueError("'scale' is positive and a normal float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A place where a rule matched and nothing will be inserted, with the reason.

    Attributes:
        tensor: What is not quantized.
        uses: For which consumers.
        rule: Name of the rule that claimed them, or the step that was not made.
        reason: Why.
        absorbed: Whether that holds only as long as the ops that read it can be absorbed by the one that makes it
            ("absorbed"); where scales turn out not to allow that, the solver quantizes it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    tensor: TensorRef
    uses: tuple[Use, ...]
    rule: str
    reason: str
    absorbed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Drawn):
    """Everything that will be done to one model.

    Attributes:
        format: The model's format.
        model: Digest of the source model.
        prepared: Digest of the model after `steps`, whose ops the plan names.
        rules: The rule files, as asked for.
        steps: Preparations, in the order they were made.
        sites: What is quantized.
        skips: What matched and is not, with the reason.
        unused: Rules that matched nothing.
        digest: Hex SHA-256 of the rule files' contents, "" where that is not known.
        corrections: Names of the corrections of weights and biases that are made once scales are known.
    """

    format: str
    model: str
    prepared: str
    rules: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    sites: tuple[Site, ...] = ()
    skips: tuple[Skip, ...] = ()
    unused: tuple[str, ...] = ()
    digest: str = ""
    corrections: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks what an edited plan may get wrong by itself."""
        for name in self.corrections:
            if name not in CORRECTIONS:
                raise ValueError(f"there is no correction {name!r}; known are {', '.join(CORRECTIONS)}")
