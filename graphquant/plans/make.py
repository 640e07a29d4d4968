"""Matches to a plan: uses of one tensor that want the same become one site, ties are followed, misfits are skipped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import Model, TensorRef, Use
from graphquant.match import Match, Matcher, name_matches
from graphquant.plans.types import Plan, Site, Skip
from graphquant.prepare import Step
from graphquant.qdq import FAMILIES, Request
from graphquant.ruleset import RuleSet, Scheme

QUANTIZED = frozenset({"quantize", "dequantize", "qdq"})
"""Kinds that are quantization already: what they make or read is not quantized again."""


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
    used: set[tuple[str, str]] = set()
    for match in matcher.matches():
        used.add((match.rule.file, match.rule.rule.name))
        draft.take(match)
    draft.follow_ties()
    return Plan(
        format=model.format,
        model=source or model.digest,
        prepared=model.digest,
        rules=ruleset.files,
        steps=tuple(steps),
        sites=tuple(draft.sites.values()),
        skips=tuple(draft.skips.values()),
        unused=tuple(rule.rule.name for rule in ruleset.rules if (rule.file, rule.rule.name) not in used),
    )


class _Draft:
    """Sites and skips while they are collected, in the order of the model."""

    def __init__(self, matcher: Matcher, choice: Choice) -> None:
        self.matcher = matcher
        self.choice = choice
        self.sites: dict[tuple[object, ...], Site] = {}
        self.skips: dict[tuple[object, ...], Skip] = {}
        self._tied: list[tuple[Match, tuple[Use, ...]]] = []
        self._order: dict[TensorRef, int] = {}

    def take(self, match: Match) -> None:
        """Adds one match as part of a site, a tie or a skip."""
        self._order.setdefault(match.tensor, len(self._order))
        reason = self._left_out(match)
        if reason:
            self._skip(match, reason)
        elif match.rule.rule.quantize == "same-as-input":
            ties = self._ties(match.tensor)
            if ties:
                self._tied.append((match, ties))
            else:
                self._skip(match, "the rule ties it to its input, and its producer has no float input")
        elif match.rule.scheme is not None:
            self._place(match, match.rule.scheme, ())

    def follow_ties(self) -> None:
        """Gives each tied tensor the scheme of the site that feeds its producer, from there on outward."""
        waiting: dict[Use, list[int]] = {}
        for index, (_, ties) in enumerate(self._tied):
            for use in ties:
                waiting.setdefault(use, []).append(index)
        done: set[int] = set()
        queue = list(self.sites.values())
        for site in queue:
            for use in site.uses:
                for index in waiting.pop(use, ()):
                    if index not in done:
                        done.add(index)
                        match, ties = self._tied[index]
                        added = self._place(match, replace(site.scheme, per="tensor"), ties)
                        if added is not None:
                            queue.append(added)
        for index, (match, ties) in enumerate(self._tied):
            if index not in done:
                read = self.matcher.model.graphs[ties[0].graph].producer(ties[0])
                self._skip(match, f"its input {read} is not quantized, and the rule ties it to that")
        self.sites = dict(sorted(self.sites.items(), key=lambda item: self._order[item[1].tensor]))
        self.skips = dict(sorted(self.skips.items(), key=lambda item: self._order[item[1].tensor]))

    def _place(self, match: Match, scheme: Scheme, ties: tuple[Use, ...]) -> Site | None:
        """Adds the use to the site that wants the same, or opens one; returns what that site now adds."""
        model, rule = self.matcher.model, match.rule.rule
        family = FAMILIES[scheme.family or self.choice.family]
        scheme = replace(scheme, family=family.name)
        output = model.output(match.tensor)
        parameter = self.matcher.parameters.is_parameter(match.tensor)
        axis = None
        if scheme.per == "channel":
            axis = self._axis(match)
            if axis is None:
                self._skip(match, f"scheme {scheme.name!r} is per channel, and {match.use} has no channel axis")
                return None
        if output.dtype is None:
            reason: str | None = "its data type is not known without running the model"
        elif family.format != model.format:
            reason = f"family {family.name!r} is for {family.format} models"
        else:
            shape = self.matcher.shape(match.tensor)
            asked = Request(type=scheme.type, axis=axis, dtype=output.dtype, shape=shape, parameter=parameter)
            reason = family.why_not(asked)
        if reason:
            self._skip(match, reason)
            return None
        graph = match.use.graph if rule.place == "body" else match.tensor.graph
        # A bias has the scales of one consumer's input and weight, so consumers never share its site.
        alone = match.use if scheme.observe.name == "bias" else None
        key = (match.tensor, graph, scheme, axis, ties, alone)
        if key in self.sites:
            self.sites[key] = replace(self.sites[key], uses=(*self.sites[key].uses, match.use))
            return replace(self.sites[key], uses=(match.use,))
        self.sites[key] = Site(
            tensor=match.tensor,
            uses=(match.use,),
            graph=graph,
            scheme=scheme,
            axis=axis,
            rule=rule.name,
            why=rule.why,
            parameter=parameter,
            tie=ties,
        )
        return self.sites[key]

    def _left_out(self, match: Match) -> str:
        """Why this match will not be quantized, whatever the scheme; "" if it may be."""
        model, rule = self.matcher.model, match.rule.rule
        if rule.quantize == "leave":
            return rule.why or f"rule {rule.name!r} leaves it in float"
        consumer = model.graphs[match.use.graph].op(match.use.op)
        if model.op(match.tensor).kind in QUANTIZED or consumer.kind in QUANTIZED:
            return "it is quantized already"
        labels = (match.use.op, model.output(match.tensor).name, f"{match.tensor.op}:{match.tensor.port}")
        if self.choice.include and not any(name_matches(pattern, *labels) for pattern in self.choice.include):
            return "--include names neither it nor its consumer"
        excluded = next((pattern for pattern in self.choice.exclude if name_matches(pattern, *labels)), None)
        return f"--exclude {excluded!r}" if excluded is not None else ""

    def _ties(self, tensor: TensorRef) -> tuple[Use, ...]:
        """The uses by which the op of `tensor` reads the float data that it passes on."""
        graph = self.matcher.model.graphs[tensor.graph]
        op = graph.op(tensor.op)
        return tuple(
            Use(tensor.graph, tensor.op, slot)
            for slot, read in enumerate(graph.slots(tensor.op))
            if read is not None and op.role(slot) == "input" and not self.matcher.parameters.is_parameter(read)
        )

    def _axis(self, match: Match) -> int | None:
        """The channel axis of the tensor where the use reads it."""
        consumer = self.matcher.model.graphs[match.use.graph].op(match.use.op)
        shape, role = self.matcher.shape(match.tensor), consumer.role(match.use.slot)
        if role == "bias":
            return 0 if shape is not None and len(shape) == 1 else None
        axis = consumer.channel_axis
        if axis is None or role != "weight" or shape is None or not -len(shape) <= axis < len(shape):
            return None
        return axis % len(shape)

    def _skip(self, match: Match, reason: str) -> None:
        key = (match.tensor, match.rule.rule.name, reason)
        before = self.skips[key].uses if key in self.skips else ()
        self.skips[key] = Skip(tensor=match.tensor, uses=(*before, match.use), rule=match.rule.rule.name, reason=reason)


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
