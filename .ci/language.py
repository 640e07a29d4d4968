"""Measure the language of the package, its documents and the assertions of its tests, and fail above the limits.

The limits are in the range of well-known projects (click, pydantic, networkx, mypy, NNCF), whose figures are 0 to 1%.
Names are words of the field, docstrings state the function, and sentences are plain. Run `python .ci/language.py` for
the figures, and with `--list MEASURE` for the places behind one of them.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]

VAGUE_WORDS = """
found one here made told known said wanted given held asked kept left seen beside behind other others each way
ways place places part parts own twin twins what who that this those such so done put taken tried meant shown
spelled alone apart both two back away ahead
"""
VAGUE = frozenset(VAGUE_WORDS.split())
"""Words that do not describe the thing that they name."""

BARE_WORDS = """
because at through judged merged stated verified searched solved observed copied handed lightened measured
halved looked proved balanced corrected taught dealt likewise around within without about above below before
after between beneath under over upon listed timed spent skipped named written drawn
"""
BARE = VAGUE | frozenset(BARE_WORDS.split())
"""Participles, prepositions and adverbs that are not names of functions by themselves."""

QUESTION = re.compile(r"^(what|whether|where|which|why|how)\b", re.IGNORECASE)

MARKERS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # Sentences without their subject, and pronouns in its place.
        r"^(so|nor|such|thus|likewise) (is|are|does|do|it|they|was|were)\b",
        r"^that (is|does|was) (so|it|all)\b",
        r"\bwhat (is|are|was|were|it|they|the|a|an|nobody|somebody|comes|goes|makes|reads)\b",
        r"\bof what\b",
        r"\bwhoever\b",
        r"\bwhichever\b",
        r"\bof (its|their) own accord\b",
        r"\b(one|ones) (that|which) (is|are) none\b",
        r"\b(is|are) none of\b",
        # Participles as nouns and verbs of speech for programs.
        r"\b(is|are|was|were|be|being) (told|said|asked|meant|taken for|held against|looked at|made of)\b",
        r"\b(tells|says|knows) (nothing|nobody|so|of what)\b",
        r"\btold (apart|of|so|by)\b",
        r"\bhand(s|ed|ing)? (it |them |values |this )?on\b",
        r"\bgive(s|n)? (it |them )?back\b",
        r"\btak(e|es|en|ing) (it |them )?(apart|over from)\b",
        r"\bcomes? to nothing\b",
        r"\bnot to be (had|seen|told)\b",
        r"\b(to|that) nobody\b",
        # Spatial metaphors for data flow and files.
        r"\bbeside\b",
        r"\bbehind (it|them|the op|an op|that)\b",
        r"\b(apart|aside) from\b",
        r"\bin the place of\b",
        r"\bon the way\b",
        r"\bfar (off|apart)\b",
        # Archaisms.
        r"\b(thereby|therein|thereof|whereof|whose own|hence|lest|albeit)\b",
        r"\bsave for\b",
        r"\bfor (which|whom) there is no\b",
        r"\bat all\b",
        r"\bby itself\b",
        r"\bso (many|much) (as|that)\b",
        r"\bbut for\b",
        r"\bforetold?|foretell\w*\b",
        r"\b(lightened|unwatchable|passed-on)\b",
    )
)
"""Turns of phrase that a reader must read twice."""

LIMITS = {
    "vague names": 1.0,
    "bare functions": 0.5,
    "question docstrings": 1.0,
    "what in docstrings": 1.0,
    "repeated classes": 5.0,
    "repeated functions": 12.0,
    "marked document sentences": 2.0,
    "marked messages": 1.0,
    "marked docstrings": 1.0,
    "prose assertions": 0.5,
    "packages": 18,
    "modules": 211,
    "lines": 67_230,
}
"""The largest allowed figure of each measure: percent, but "what" per 1,000 words, and the last three are counts."""

MIN_MESSAGE_WORDS = 4
"""Shorter strings are keys and labels, no sentences."""

_WORD = r"[A-Za-z]?[a-z]+(?:['-][a-z]+)*"

_VALUE = r"(?:'[^' ]*'|[\d.]+%?|\[[^\]]*\])"

PHRASE = re.compile(rf"(?<![\w/.$\\-]){_WORD}(?:[,;:]?(?: {_VALUE}[,;:]?){{0,2}} {_WORD}){{3,}}(?![\w/=(-])")
"""Four or more words, with only names and numbers between them: prose, if one of them is a function word."""

FUNCTION_WORD_LIST = """
the an is are was were be has have had of in on to for with by not no it its and or as at from than that this
these cannot does do must needs has only which if into every each all but so there they them their
"""
FUNCTION_WORDS = frozenset(FUNCTION_WORD_LIST.split())

QUOTING_CALL_LIST = """
all any append approx count dedent dict endswith escape find findall format fullmatch index join len list match
partition removeprefix removesuffix replace search set sorted split startswith tuple
"""
QUOTING_CALLS = frozenset(QUOTING_CALL_LIST.split())
"""Calls whose arguments are quoted. The arguments of other calls in an assertion are inputs."""

PROSE_TESTS = {
    "quantize/test_reasons.py": "the sentences of `explain` on the origin of each scale",
    "rules/test_mistakes.py": "one readable line for each mistake in a rule file, with what was meant",
    "utils/test_text.py": "lists of names in sentences",
}
"""Test modules that may quote prose, because the wording is their subject, with the reason."""


@dataclass
class Measure:
    """A share: `hits`, with the place of each, of `total`."""

    total: int = 0
    hits: list[str] = field(default_factory=list)
    per: int = 100

    def count(self, place: str, *, hit: bool) -> None:
        """Add one to the total, and `place` to the hits."""
        self.total += 1
        if hit:
            self.hits.append(place)

    @property
    def figure(self) -> float:
        """The hits per 100, or per 1,000."""
        return self.per * len(self.hits) / max(1, self.total)


def measure_package(folder: Path) -> dict[str, Measure]:
    """Measure the names, docstrings and messages of all modules in `folder`."""
    measures = {name: Measure() for name in LIMITS if name not in {"prose assertions", "packages", "modules", "lines"}}
    measures["what in docstrings"].per = 1000
    definitions: dict[str, list[tuple[str, str]]] = {"repeated classes": [], "repeated functions": []}
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        _measure_names(tree, path, measures)
        _measure_prose(tree, path, measures)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                definitions["repeated classes"].append((node.name, f"{path}:{node.lineno}: {node.name}"))
            elif isinstance(node, ast.FunctionDef):
                definitions["repeated functions"].append((node.name, f"{path}:{node.lineno}: {node.name}"))
    for measure, named in definitions.items():
        uses = Counter(name for name, _ in named)
        for name, place in named:
            measures[measure].count(place, hit=uses[name] > 1)
    return measures


def _measure_names(tree: ast.Module, path: Path, measures: dict[str, Measure]) -> None:
    """Count the bound names that are vague, and the functions that are named by a participle or preposition."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            names += [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            measures["bare functions"].count(
                f"{path}:{node.lineno}: {node.name}", hit=node.name.strip("_").lower() in BARE
            )
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        for name in names:
            place = f"{path}:{getattr(node, 'lineno', 0)}: {name}"
            measures["vague names"].count(place, hit=name.strip("_").lower() in VAGUE)


def _measure_prose(tree: ast.Module, path: Path, measures: dict[str, Measure]) -> None:
    """Count questions and "what" in docstrings, and marked phrases in messages."""
    docstrings = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]  # a docstring is an expression
        place = f"{path}:{node.body[0].lineno}: {text.splitlines()[0]}"
        measures["question docstrings"].count(place, hit=bool(QUESTION.match(text)))
        for sentence in sentences(text):
            measures["marked docstrings"].count(f"{place}: {sentence}", hit=is_marked(sentence))
        for word in re.findall(r"[a-z']+", text.lower()):
            measures["what in docstrings"].count(place, hit=word == "what")
    for node in ast.walk(tree):
        text = _message(node) if id(node) not in docstrings else ""
        if len(text.split()) >= MIN_MESSAGE_WORDS:
            for sentence in sentences(text):
                measures["marked messages"].count(
                    f"{path}:{getattr(node, 'lineno', 0)}: {sentence}", hit=is_marked(sentence)
                )


def _message(node: ast.AST, value: str = "x") -> str:
    """Return the text of a string or f-string with `value` for each inserted value; "" for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else value
            for part in node.values
        )
    return ""


def sentences(text: str) -> Iterator[str]:
    """Split prose into sentences."""
    for sentence in re.split(r"(?<=[.!?:;])\s+|\n\s*\n", text):
        plain = " ".join(sentence.split())
        if plain:
            yield plain


def is_marked(sentence: str) -> bool:
    """Tell if a sentence has one of the marked phrases."""
    return any(marker.search(sentence) for marker in MARKERS)


def measure_documents(paths: list[Path]) -> Measure:
    """Measure the sentences of Markdown documents, without code, tables' rules and links."""
    measure = Measure()
    for path in paths:
        text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
        text = re.sub(r"`[^`]*`", "x", text)
        text = re.sub(r"\]\([^)]*\)", "]", text)
        text = re.sub(r"^\s*(?:[-*#>|]+|\d+\.)\s*", "\n\n", text, flags=re.MULTILINE)
        for sentence in sentences(text.replace("|", "\n\n")):
            if len(sentence.split()) >= MIN_MESSAGE_WORDS:
                measure.count(f"{path}: {sentence}", hit=is_marked(sentence))
    return measure


def measure_assertions(folder: Path) -> Measure:
    """Measure the assertions of the tests in `folder` that quote prose in place of codes, names and values.

    Assertions are assert statements, the patterns of pytest.raises and pytest.warns, and the arguments of helpers that
    assert them. A literal that reaches an assertion by a parameter or a variable is an assertion of its own.
    """
    measure = Measure()
    paths = [path for path in sorted(folder.rglob("*.py")) if path.relative_to(folder).as_posix() not in PROSE_TESTS]
    trees = {path: ast.parse(path.read_text("utf-8")) for path in paths}
    shared: dict[str, ast.FunctionDef] = {}
    for path, tree in trees.items():
        if path.parent.name == "support" or path.name == "conftest.py":
            shared |= {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    counted: set[int] = set()
    for path, tree in trees.items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        helpers = shared | {function.name: function for function in functions}
        for function in functions:
            names = {**_literals(tree.body), **_literals(list(ast.walk(function))), **_cases(function)}
            for node in ast.walk(function):
                for quoted in _assertions(node, helpers):
                    reached = [
                        literal for name in _quoted(quoted) if isinstance(name, ast.Name)
                        for literal in names.get(name.id, ())
                    ]  # fmt: skip
                    for expression in (quoted, *reached):
                        if id(expression) in counted:
                            continue
                        counted.add(id(expression))
                        texts = [_message(part, "0") for part in _quoted(expression)]
                        phrases = [text for text in texts if is_phrase(text)]
                        place = f"{path}:{expression.lineno}: {' | '.join(phrases)}"
                        measure.count(place, hit=bool(phrases))
    return measure


def is_phrase(text: str) -> bool:
    """Tell if a literal holds prose."""
    return any(FUNCTION_WORDS & set(re.split(r"\W+", match.group().lower())) for match in PHRASE.finditer(text))


def _assertions(node: ast.AST, helpers: dict[str, ast.FunctionDef]) -> Iterator[ast.expr]:
    """Yield the expressions that `node` asserts."""
    if isinstance(node, ast.Assert):
        yield node.test
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in {"raises", "warns"}:
            patterns = [keyword.value for keyword in node.keywords if keyword.arg == "match"]
            yield patterns[0] if patterns else ast.Constant(value=0, lineno=node.lineno)
        elif name in helpers:
            helper = helpers[name]
            asserted = {
                part.id
                for statement in ast.walk(helper)
                for quoted in _assertions(statement, {})
                for part in _quoted(quoted)
                if isinstance(part, ast.Name)
            }
            parameters = [argument.arg for argument in (*helper.args.posonlyargs, *helper.args.args)]
            given = [*zip(parameters, node.args, strict=False), *((key.arg, key.value) for key in node.keywords)]
            yield from (value for parameter, value in given if parameter in asserted)


def _quoted(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the strings and names of an expression, without the arguments of calls that compute its value."""
    if isinstance(node, ast.Constant | ast.JoinedStr | ast.Name):
        yield node
        return
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        children = [node.func, *(node.args if name in QUOTING_CALLS else ())]
    for child in children:
        yield from _quoted(child)


def _literals(statements: list[ast.AST] | list[ast.stmt]) -> dict[str, list[ast.expr]]:
    """Return the literals that are assigned to variables, of dicts only the values."""
    return {
        target.id: statement.value.values if isinstance(statement.value, ast.Dict) else [statement.value]
        for statement in statements
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant | ast.JoinedStr | ast.Dict | ast.List | ast.Tuple | ast.Set)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


def _cases(function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """Return the literals of each parameter that pytest.mark.parametrize gives to a test."""
    cases: dict[str, list[ast.expr]] = {}
    for decorator in function.decorator_list:
        if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("mark.parametrize")):
            continue
        names, rows = decorator.args[:2]
        parameters = [_message(name) for name in (names.elts if isinstance(names, ast.Tuple | ast.List) else [names])]
        parameters = [name.strip() for text in parameters for name in text.split(",")]
        for row in rows.elts if isinstance(rows, ast.Tuple | ast.List) else ():
            values = [row]
            if isinstance(row, ast.Call):  # pytest.param
                values = row.args
            elif len(parameters) > 1 and isinstance(row, ast.Tuple | ast.List):
                values = row.elts
            for parameter, value in zip(parameters, values, strict=False):
                cases.setdefault(parameter, []).append(value)
    return cases


def main() -> int:
    """Print each measure with its limit. Returns 1 if one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", metavar="MEASURE", help="print the places of this measure, as 'vague names'")
    parser.add_argument("--only", default="", help="only places whose path contains this text")
    options = parser.parse_args()
    package = ROOT / "graphquant"
    measures = measure_package(package)
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    measures["marked document sentences"] = measure_documents(documents)
    measures["prose assertions"] = measure_assertions(ROOT / "tests")
    if options.list:
        print(*(place for place in measures[options.list].hits if options.only in place), sep="\n")
        return 0
    figures: dict[str, float] = {name: measure.figure for name, measure in measures.items()}
    modules = list(package.rglob("*.py"))
    figures["packages"] = sum(
        (path / "__init__.py").exists() or (path.suffix == ".py" and not path.name.startswith("__"))
        for path in package.iterdir()
    )
    figures["modules"] = len(modules)
    figures["lines"] = sum(path.read_text("utf-8").count("\n") for path in modules)
    for name, limit in LIMITS.items():
        mark = "above the limit" if figures[name] > limit else ""
        print(f"{name:<28}{figures[name]:>10.6g}{limit:>10g}  {mark}".rstrip())
    return int(any(figures[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
