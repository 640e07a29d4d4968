"""TOML files that users write: read within bounds, checked, and all their mistakes told at once."""

from graphquant.documents.form import Form, attributes, describe, keys
from graphquant.documents.locate import KeyPath, locate, nearest
from graphquant.documents.mistakes import Mistake, check, listed, shown
from graphquant.documents.read import MAX_BYTES, failure, mistaken, parse, read

__all__ = [
    "MAX_BYTES",
    "Form",
    "KeyPath",
    "Mistake",
    "attributes",
    "check",
    "describe",
    "failure",
    "keys",
    "listed",
    "locate",
    "mistaken",
    "nearest",
    "parse",
    "read",
    "shown",
]
