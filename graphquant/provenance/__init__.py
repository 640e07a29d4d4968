"""What a written model says of where it came from, and the record that gives back the model that it was made of."""

from graphquant.provenance.record import make, restore, shape
from graphquant.provenance.texts import OPS, PREFIX, RECORD, said_of_ops

__all__ = ["OPS", "PREFIX", "RECORD", "make", "restore", "said_of_ops", "shape"]
