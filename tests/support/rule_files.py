"""Write rules and rule files."""

from pathlib import Path


def rule_text(name: str = "r", producer: str = "{}", consumer: str = "{}", quantize: str = "q", more: str = "") -> str:
    """Return a rule as TOML."""
    return f'[[rule]]\nname = "{name}"\nproducer = {producer}\nconsumer = {consumer}\nquantize = "{quantize}"\n{more}\n'


def write_rules(folder: Path, text: str) -> list[str]:
    """Write a rule file, and return the value of `rules` that names it."""
    path = folder / "rules.toml"
    path.write_text(text, "utf-8")
    return [str(path)]
