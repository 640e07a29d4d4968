"""Names as rules write them, and the check that those of a rule file are in the model."""

from __future__ import annotations

import fnmatch
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import Model, TensorRef, Use
from graphquant.ruleset import BoundRule, RuleSet, compile_regex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Readers = Iterable[tuple[TensorRef, list[Use]]]


def name_matches(pattern: str, *names: str) -> bool:
    """Whether one of `names` is `pattern`, or matches it as a glob, or as a regex between slashes, found anywhere."""
    found = _compiled(pattern)
    return any(name and (name == pattern or found.search(name)) for name in names)


def op_labels(graph: str, op: str) -> tuple[str, ...]:
    """The names by which a consumer's selector may call an op."""
    return (op, f"{graph}/{op}") if graph else (op,)


def tensor_labels(model: Model, tensor: TensorRef) -> tuple[str, ...]:
    """The names by which a producer's selector may call `tensor`."""
    op = model.op(tensor)
    names = (op.outputs[tensor.port].name, f"{op.name}:{tensor.port}", str(tensor))
    return (*names, *op_labels(tensor.graph, op.name)) if tensor.port == 0 else names


def producer_labels(model: Model) -> Iterator[str]:
    """Every name that a producer's selector can match, in the live graphs."""
    for name in model.live():
        for op in model.graphs[name].ops():
            for port in range(len(op.outputs)):
                yield from (label for label in tensor_labels(model, TensorRef(name, op.name, port)) if label)


def consumer_labels(model: Model) -> Iterator[str]:
    """Every name that a consumer's selector can match, in the live graphs."""
    for name in model.live():
        for op in model.graphs[name].ops():
            yield from op_labels(name, op.name)


def check_names(model: Model, ruleset: RuleSet, tensors: Callable[[], Readers]) -> None:
    """Checks that each name selector of a rule that is not optional matches something.

    Args:
        model: The model.
        ruleset: The rules.
        tensors: Gives the tensors that rules are for, each with its consumers.

    Raises:
        UsageError: One matches nothing, or the two of a rule never meet.
    """
    sides = (("producer", producer_labels), ("consumer", consumer_labels))
    for side, listed in sides:
        selected = [(rule, getattr(rule.rule, side).name) for rule in ruleset.rules if not rule.rule.optional]
        wanted = [(rule, pattern) for rule, pattern in selected if pattern is not None]
        labels = list(dict.fromkeys(listed(model))) if wanted else []
        for rule, pattern in wanted:
            if not name_matches(pattern, *labels):
                raise UsageError(
                    f"{rule.file}:{rule.line}: rule {rule.rule.name!r}: the {side} name {pattern!r} matches nothing"
                    " in the model."
                    f"{did_you_mean(pattern, labels) or ' Names are listed by: graphquant inspect MODEL.'}"
                    " If it may be absent, say optional = true."
                )
    for rule in ruleset.rules:
        if rule.rule.producer.name and rule.rule.consumer.name and not rule.rule.optional:
            _check_reads(model, tensors(), rule, rule.rule.producer.name, rule.rule.consumer.name)


def _check_reads(model: Model, tensors: Readers, rule: BoundRule, producer: str, consumer: str) -> None:
    """Refuses a rule whose two names match, but no op of the one name reads a tensor of the other."""
    named = [(tensor, uses) for tensor, uses in tensors if name_matches(producer, *tensor_labels(model, tensor))]
    readers = dict.fromkeys(use for _, uses in named for use in uses)
    if not any(name_matches(consumer, *op_labels(use.graph, use.op)) for use in readers):
        some = ", ".join(repr(use.op) for use in list(readers)[:5])
        raise UsageError(
            f"{rule.file}:{rule.line}: rule {rule.rule.name!r}: no op called {consumer!r} reads a float tensor"
            f" called {producer!r}.{f' Those are read by {some}.' if some else ''} If that may be, say optional ="
            " true."
        )


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    if len(pattern) > 1 and pattern[0] == pattern[-1] == "/":
        return compile_regex(pattern[1:-1])
    return re.compile(rf"\A(?:{fnmatch.translate(pattern)})")
