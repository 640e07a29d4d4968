"""Write rules and rule files."""

from pathlib import Path

SHIPPED = Path(__file__).parents[2] / "rules"


def rule_text(name: str = "r", producer: str = "{}", consumer: str = "{}", quantize: str = "q", more: str = "") -> str:
    """Return a rule as TOML."""
    return f'[[rule]]\nname = "{name}"\nproducer = {producer}\nconsumer = {consumer}\nquantize = "{quantize}"\n{more}\n'


def weight_rule(kind: str, quantize: str = "weight") -> str:
    """Return the rule of weights of ops of these kinds."""
    return rule_text("weight", '{ kind = "parameter" }', f'{{ kind = "{kind}", input = "weight" }}', quantize)


def input_rule(kind: str, quantize: str = "activation") -> str:
    """Return the rule of the data inputs of ops of these kinds."""
    return rule_text("input", consumer=f'{{ kind = "{kind}", input = "input" }}', quantize=quantize)


def write_rules(folder: Path, text: str) -> list[str]:
    """Write a rule file, and return the value of `rules` that names it."""
    path = folder / "rules.toml"
    path.write_text(text, "utf-8")
    return [str(path)]


def write_int4_rules(folder: Path) -> str:
    """Write `weight_only_int4` without the rule for small products, which have 8 bits; return the path."""
    path = folder / "int4.toml"
    if not path.exists():  # a resumed command needs the same file
        path.write_text((SHIPPED / "weight_only_int4.toml").read_text().replace("max_size = 16383", "max_size = 0"))
    return str(path)
