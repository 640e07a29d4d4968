"""TensorFlow 1's `contrib.graph_editor` for graphquant's models, TensorFlow and ONNX, nested graphs included.

from graphquant import graph_editor as ge

model = gq.load("model.pb")
ge.insert_quant_op(model, "conv1/Relu:0", "conv2", ge.FixedPoint(bits=8, exponent=-4))
model.save("model.quant.pb")

docs/from-graph-editor.md shows how to port TF1 code.
"""

from graphquant.api.graph_editor.recipe import FixedPoint, insert_quant_op, make_quant_op
from graphquant.api.graph_editor.verbs import (
    get_consuming_ops,
    get_generating_ops,
    get_name_scope_ops,
    get_tensor_by_name,
    reroute_ts,
    select_ops,
    select_ts,
    swap_ts,
)
from graphquant.api.graph_editor.views import Operation

__all__ = [
    "FixedPoint",
    "Operation",
    "get_consuming_ops",
    "get_generating_ops",
    "get_name_scope_ops",
    "get_tensor_by_name",
    "insert_quant_op",
    "make_quant_op",
    "reroute_ts",
    "select_ops",
    "select_ts",
    "swap_ts",
]
