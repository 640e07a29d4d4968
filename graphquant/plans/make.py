"""Matches to a plan: uses of one tensor that want the same become one site, ties are followed, misfits are skipped."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import (
    FORWARDING,
    Graph,
    Model,
    Op,
    TensorRef,
    Use,
    bulk,
    channel_axis,
    channel_view,
    summed_axis,
)
from graphquant.match import Match, Matcher, name_matches
from graphquant.plans.already import HANDED, quantized_already, reads_quantized
from graphquant.plans.copies import copied
from graphquant.plans.types import Plan, Site, Skip
from graphquant.qdq import FAMILIES, Family
from graphquant.ruleset import Scheme

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from graphquant.ir import Shape
    from graphquant.prepare import Step
    from graphquant.ruleset import RuleSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the caller chose beside the rules.

    Attributes:
        family: The QDQ family for schemes that name none.
        include: If given, only uses whose consumer or tensor has such a name are quantized.
        exclude: Uses whose consumer or tensor has such a name are left.
    """

    family: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@bulk()
def make_plan(model: Model, ruleset: RuleSet, choice: Choice, *, steps: Sequence[Step] = (), source: str = "") -> Plan:
    """The plan of `ruleset` for `model`.

    Args:
        model: The prepared model.
        ruleset: The rules, first match wins.
        choice: What the caller chose beside them.
        steps: How the model was prepared.
        source: Digest of the model as it was before.

    Raises:
        UsageError: A name selector, include or exclude matches nothing.
    """
    matcher = Matcher(model, ruleset)
    _check_patterns(matcher, choice)
    draft = _Draft(matcher, choice)
    for match in matcher.matches():
        draft.take(match)
    draft.follow_ties()
    draft.heed_bodies()
    sites = draft.sites()
    return Plan(
        format=model.format,
        model=source or model.digest,
        prepared=model.digest,
        rules=ruleset.files,
        steps=tuple(steps),
        sites=(*sites, *copied(model, matcher.parameters, sites)),
        skips=draft.skips(),
        unused=tuple(rule.rule.name for rule in ruleset.rules if id(rule) not in draft.used),
        digest=ruleset.digest,
        corrections=ruleset.correct,
    )


TIE = "same-as-input"

PASSED = "passed-on"

ABSORBED = "absorbed"

FOLLOWING = frozenset({TIE, PASSED})
"""What rules say that hangs on whether the producer's input is quantized."""

JOINING = frozenset({"concat", "pack"})
"""Kinds whose output holds all of their inputs, weights too."""

WEIGHT_MADE = "its consumer makes a weight of weights alone, and that is quantized where it is used"

CAPTURED = "a body reads what its consumer makes of it, past which onnxruntime moves the pair, and then it ends at once"

INPUTLESS = "the rule ties it to its input, and its producer has none"

UNTIED = "its input is not quantized, and the rule ties it to that"
"""Why a tied tensor is skipped; the same words for each, so that many become one line."""


@dataclass(slots=True, kw_only=True)
class _Open:
    """A site or skip while uses are added to it."""

    first: Match
    uses: list[Use]
    scheme: Scheme = field(default_factory=Scheme)
    axis: int | None = None
    view: Shape | None = None
    tie: tuple[Use, ...] = ()
    reason: str = ""


class _Draft:
    """Sites and skips while they are collected, in the order of the model."""

    def __init__(self, matcher: Matcher, choice: Choice) -> None:
        self.matcher = matcher
        self.choice = choice
        self._sites: dict[tuple[object, ...], _Open] = {}
        self._skips: dict[tuple[object, ...], _Open] = {}
        self._tied: dict[tuple[str, str], list[Match]] = {}
        self._passed: dict[Use, Use] = {}  # to where the integers come from
        self._order: dict[TensorRef, int] = {}
        self.used: set[int] = set()

    def take(self, match: Match) -> None:
        """Adds one match as part of a site, a tie or a skip."""
        self._order.setdefault(match.tensor, len(self._order))
        if match.rule.rule.quantize in FOLLOWING and not self._left_out(match):
            self.used.add(id(match.rule))
            self._tied.setdefault((match.tensor.graph, match.tensor.op), []).append(match)
        else:
            self._settle(match)

    def follow_ties(self) -> None:
        """Gives each tied tensor the scheme of the site that feeds its producer, from there on outward.

        Where nothing feeds it, a tie says nothing: the use goes to the next rule that holds for it, if there is one.
        """
        ties = {op: self._ties(*op, matches) for op, matches in self._tied.items()}
        by_use = {use: op for op, uses in ties.items() for use in uses}
        self._hand_on(ties, by_use)
        self._spread([(use, site.scheme) for site in self._sites.values() for use in site.uses], ties, by_use)
        for op in list(self._tied):
            for match in self._tied.pop(op, ()):
                later = self._next(match)
                if later is None:
                    if match.rule.rule.quantize == TIE:
                        self._skip(match, UNTIED if ties[op] else INPUTLESS)
                    continue
                scheme = self._settle(later)
                if scheme is not None:
                    self._spread([(later.use, scheme)], ties, by_use)

    def _hand_on(self, ties: dict[tuple[str, str], tuple[Use, ...]], by_use: dict[Use, tuple[str, str]]) -> None:
        """Leaves what is handed on of tensors that are quantized already."""
        queue = [use for uses in ties.values() for use in uses if reads_quantized(self.matcher, use)]
        for fed in queue:
            op = by_use.get(fed)
            matches = self._tied.get(op, []) if op is not None else []
            for match in [one for one in matches if one.rule.rule.quantize == PASSED]:
                matches.remove(match)
                self._skip(match, HANDED)
                queue.append(match.use)

    def _settle(self, match: Match) -> Scheme | None:
        """Adds one match as part of a site, whose scheme is returned, or as a skip."""
        self.used.add(id(match.rule))
        reason = self._left_out(match)
        if reason:
            self._skip(match, reason)
        elif match.rule.scheme is not None and self._place(match, match.rule.scheme, ()):
            return match.rule.scheme
        return None

    def _spread(
        self,
        queue: list[tuple[Use, Scheme]],
        ties: dict[tuple[str, str], tuple[Use, ...]],
        by_use: dict[Use, tuple[str, str]],
    ) -> None:
        """Places what is tied to the quantized uses in `queue`, and what is tied to that."""
        for fed, scheme in queue:
            op = by_use.get(fed)
            for match in self._tied.pop(op, ()) if op is not None else ():
                per_tensor = replace(scheme, per="tensor", axis=None, block_size=None)
                if match.rule.rule.quantize == PASSED and match.use.graph == match.tensor.graph:
                    self._passed[match.use] = self._passed.get(fed, fed)
                elif not self._place(match, per_tensor, ties[match.tensor.graph, match.tensor.op]):
                    continue
                queue.append((match.use, per_tensor))

    def heed_bodies(self) -> None:
        """Takes out uses whose consumer onnxruntime would move the pair past, to where only a body can read it."""
        model = self.matcher.model
        placed = {use for site in self._sites.values() for use in site.uses}
        for key, site in list(self._sites.items()) if model.format == "onnx" else ():
            for use in list(site.uses):
                graph = model.graphs[use.graph]
                read = [one for uses in graph.readers(use.op).values() for one in uses] if _moved(graph, use) else []
                if any(one.graph != use.graph and one not in placed for one in read):
                    site.uses.remove(use)
                    self._skip(replace(site.first, use=use), CAPTURED)
            if not site.uses:
                del self._sites[key]

    def _next(self, match: Match) -> Match | None:
        """The next rule that holds for a use whose tie came to nothing; ties do not."""
        rules = self.matcher.ruleset.rules
        behind = next(index for index, rule in enumerate(rules) if rule is match.rule) + 1
        for rule in rules[behind:]:
            if rule.rule.quantize not in FOLLOWING and not self.matcher.miss(rule, match.tensor, match.use):
                return replace(match, rule=rule)
        return None

    def sites(self) -> tuple[Site, ...]:
        """The sites, in the order of the model."""
        return tuple(
            Site(
                tensor=item.first.tensor,
                uses=tuple(item.uses),
                graph=self._graph(item.first),
                scheme=item.scheme,
                axis=item.axis,
                view=None if item.view is None else tuple(size for size in item.view if size is not None),
                rule=item.first.rule.rule.name,
                why=item.first.rule.rule.why,
                parameter=self.matcher.parameters.is_parameter(item.first.tensor),
                tie=tuple(self._passed.get(use, use) for use in item.tie),
            )
            for item in self._sorted(self._sites)
        )

    def skips(self) -> tuple[Skip, ...]:
        """The skips, in the order of the model."""
        return tuple(
            Skip(
                tensor=item.first.tensor,
                uses=tuple(item.uses),
                rule=item.first.rule.rule.name,
                reason=item.reason,
                absorbed=item.first.rule.rule.quantize == ABSORBED,
            )
            for item in self._sorted(self._skips)
        )

    def _sorted(self, items: dict[tuple[object, ...], _Open]) -> list[_Open]:
        return sorted(items.values(), key=lambda item: self._order[item.first.tensor])

    def _place(self, match: Match, scheme: Scheme, tie: tuple[Use, ...]) -> bool:
        """Adds the use to the site that wants the same, or opens one; False if it is skipped instead."""
        family = FAMILIES[scheme.family or self.choice.family]
        axis = self._axis(match, scheme)
        view = self._view(match) if scheme.per == "channel" and axis is not None and scheme.axis is None else None
        reason = self._misfit(match, scheme, family, axis, view)
        if tie and scheme.range == "dynamic":
            reason = reason or "it is tied to a tensor with a dynamic range, which has no scale to share"
        if tie and scheme.range == "learned":
            reason = reason or "it is tied to a tensor with a learned range, which it could not follow"
        if reason:
            self._skip(match, reason)
            return False
        scheme = replace(scheme, family=family.name)
        key = (match.tensor, self._graph(match), scheme, axis, view, bool(tie))
        if key not in self._sites:
            self._sites[key] = _Open(first=match, uses=[], scheme=scheme, axis=axis, view=view, tie=tie)
        self._sites[key].uses.append(match.use)
        return True

    def _misfit(self, match: Match, scheme: Scheme, family: Family, axis: int | None, view: Shape | None) -> str:
        """Why the use cannot be quantized by that scheme, "" if it can."""
        model, output = self.matcher.model, self.matcher.model.output(match.tensor)
        if scheme.per != "tensor" and axis is None:
            return _no_axis(scheme, match.use)
        if view is not None and None in view:
            return f"scheme {scheme.name!r} is per channel, and the sizes of the kernel are not known"
        if output.dtype is None:
            return "its data type is not known without running the model"
        if family.format != model.format:
            return f"family {family.name!r} is for {family.format} models"
        asked = scheme.request(
            axis=axis,
            dtype=output.dtype,
            shape=view or self.matcher.shape(match.tensor),
            parameter=self.matcher.parameters.is_parameter(match.tensor),
        )
        return family.why_not(asked) or ""

    @staticmethod
    def _graph(match: Match) -> str:
        """The graph that gets the new ops."""
        return match.use.graph if match.rule.rule.place == "body" else match.tensor.graph

    def _left_out(self, match: Match) -> str:
        """Why this match will not be quantized, whatever the scheme; "" if it may be."""
        model, rule = self.matcher.model, match.rule.rule
        if rule.quantize in {"leave", ABSORBED}:
            return rule.why or f"rule {rule.name!r} leaves it in float"
        consumer = model.graphs[match.use.graph].op(match.use.op)
        already = quantized_already(self.matcher, match.tensor, match.use)
        if already:
            return already
        if not (rule.producer.name or rule.consumer.name) and self._makes_weights(match.use, consumer):
            return WEIGHT_MADE
        labels = (match.use.op, *self.matcher.labels(match.tensor))
        if self.choice.include and not any(name_matches(pattern, *labels) for pattern in self.choice.include):
            return "--include names neither it nor its consumer"
        excluded = next((pattern for pattern in self.choice.exclude if name_matches(pattern, *labels)), None)
        return f"--exclude {excluded!r}" if excluded is not None else ""

    def _makes_weights(self, use: Use, consumer: Op) -> bool:
        """Whether `consumer`, the op of `use`, computes a weight from weights alone."""
        made = TensorRef(use.graph, use.op)
        return consumer.kind not in FORWARDING and self.matcher.parameters.is_parameter(made)

    def _ties(self, graph: str, name: str, matches: Sequence[Match]) -> tuple[Use, ...]:
        """The uses by which an op reads the float data that it passes on; weights too, if it alters nothing."""
        home = self.matcher.model.graphs[graph]
        op = home.op(name)
        weights = op.kind in JOINING or any(match.rule.rule.quantize == PASSED for match in matches)
        return tuple(
            Use(graph, name, slot)
            for slot, read in enumerate(home.slots(name))
            if read is not None
            and op.role(slot) == "input"
            and (weights or not self.matcher.parameters.is_parameter(read))
        )

    def _axis(self, match: Match, scheme: Scheme) -> int | None:
        """The axis of the channels or blocks of the tensor where the use reads it; None per tensor."""
        consumer = self.matcher.model.graphs[match.use.graph].op(match.use.op)
        shape, role = self.matcher.shape(match.tensor), consumer.role(match.use.slot)
        if scheme.per == "tensor":
            return None
        if scheme.axis is not None:
            return scheme.axis if shape is not None and scheme.axis < len(shape) else None
        if scheme.per == "block":
            return summed_axis(consumer, role, shape) if shape is not None else None
        if role == "bias":
            return 0 if shape is not None and len(shape) == 1 else None
        return channel_axis(consumer, shape) if role == "weight" and shape is not None else None

    def _view(self, match: Match) -> Shape | None:
        """The shape in which that axis holds all channels, where it is not the tensor's own."""
        consumer = self.matcher.model.graphs[match.use.graph].op(match.use.op)
        shape, role = self.matcher.shape(match.tensor), consumer.role(match.use.slot)
        return channel_view(consumer, shape) if role == "weight" and shape is not None else None

    def _skip(self, match: Match, reason: str) -> None:
        key = (match.tensor, match.rule.rule.name, reason)
        if key not in self._skips:
            self._skips[key] = _Open(first=match, uses=[], reason=reason)
        self._skips[key].uses.append(match.use)


MOVED = frozenset({"max_pool", "reshape", "transpose", "squeeze", "unsqueeze", "slice"})
"""Kinds past which onnxruntime moves pairs."""


def _moved(graph: Graph, use: Use) -> bool:
    """Whether onnxruntime would move a pair on `use` past its op."""
    op = graph.op(use.op)
    return op.kind in MOVED and op.role(use.slot) == "input"


def _no_axis(scheme: Scheme, use: Use) -> str:
    """Why there is no axis of channels or blocks."""
    if scheme.axis is not None:
        return f"scheme {scheme.name!r} is for axis {scheme.axis}, and the tensor is not known to have that many"
    if scheme.per == "block":
        return f"scheme {scheme.name!r} is per block, and {use} has no axis that is summed over; give 'axis'"
    return f"scheme {scheme.name!r} is per channel, and {use} has no channel axis"


def _check_patterns(matcher: Matcher, choice: Choice) -> None:
    asked: Iterable[tuple[str, str]] = [
        *(("--include", pattern) for pattern in choice.include),
        *(("--exclude", pattern) for pattern in choice.exclude),
    ]
    labels = matcher.all_labels() if choice.include or choice.exclude else []
    for option, pattern in asked:
        if not any(name_matches(pattern, label) for label in labels):
            raise UsageError(
                f"{option} {pattern!r} matches no op or tensor of the model."
                f"{did_you_mean(pattern, labels) or ' Names are listed by: graphquant inspect MODEL.'}"
            )
