"""The vocabulary of kinds and roles."""

import pytest

from graphquant.formats.onnx import ops as onnx_ops
from graphquant.formats.tensorflow import ops as tensorflow_ops
from graphquant.ir import Op
from graphquant.ir.kinds import KINDS, PSEUDO_KINDS, ROLES

OP_TABLES = {
    "onnx": {**onnx_ops.DEFAULT_DOMAIN_OPS, **onnx_ops.MICROSOFT_DOMAIN_OPS},
    "tensorflow": tensorflow_ops._OP_INFOS,
}


@pytest.mark.parametrize("framework", OP_TABLES)
def test_op_tables_use_known_kinds_and_roles(framework):
    """Op tables use only kinds and roles with a description, and no pseudo-kind."""
    infos = OP_TABLES[framework].values()
    assert sorted({info.kind for info in infos} - (KINDS.keys() - PSEUDO_KINDS.keys())) == []
    assert sorted({role for info in infos for role in info.roles} - ROLES.keys()) == []


def test_every_kind_and_role_is_described():
    """Every kind and role has a short description and is a valid word in rule files."""
    words = {**KINDS, **ROLES}
    assert [word for word, text in words.items() if not text or len(text) > 80] == []
    assert [word for word in words if word != "*" and not word.replace("_", "").isalnum()] == []


@pytest.mark.parametrize(("roles", "main"), [((), 0), (("axis", "input"), 1), (("condition", "input", "input"), 1)])
def test_main_slot(roles, main):
    """TensorFlow's Split has its axis first."""
    assert Op(name="op", kind="split", type="Split", roles=roles).main_slot == main
