"""The table of TensorFlow's operations, without TensorFlow: kind, input roles, channel axis of the weight, arguments.

`opdefs.txt` has a line for each operation that TensorFlow registers; its header describes the format. A line is parsed
when its operation is first used. A node's ports follow from its operation's arguments and the node's attributes: an
argument is one tensor, a number of tensors of one type (an attribute holds it), or one tensor for each type in a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple, TypeAlias

from graphquant.errors import ModelError
from graphquant.formats.tensorflow.proto import dtype_name
from graphquant.ir import OpInfo

AttrDefault: TypeAlias = str | int | tuple[str, ...]

# Real nodes have fewer ports, and expanding a hostile number would exhaust memory.
_MAX_PORTS: Final = 65_536
_DEFAULT_KINDS: Final = {"i": int, "type": str, "list": tuple}


class ArgSpec(NamedTuple):
    """An input or output argument of an operation, which stands for one port or several."""

    name: str  # the argument's name
    dtype: str = ""  # the numpy-like name of its type if the operation fixes it
    type_attr: str = ""  # otherwise the attribute that holds its type
    number_attr: str = ""  # the attribute with the number of ports of that type; without it there is one port
    type_list_attr: str = ""  # the attribute that lists the types of the argument's ports, one each
    is_ref: bool = False  # True if the type is a reference to a TF1 variable's buffer


class OpSpec(NamedTuple):
    """An operation."""

    name: str  # its type, for instance "MatMul"
    inputs: tuple[ArgSpec, ...]  # its input arguments
    outputs: tuple[ArgSpec, ...]  # its output arguments
    is_stateful: bool  # True if a call may depend on more than its inputs, or has side effects
    # The defaults of the attributes that arguments refer to; a saved model may leave such values out.
    defaults: Mapping[str, AttrDefault]


class OpTable:
    """Operations by name: those that TensorFlow registers, and those that a model defines."""

    def __init__(self, lines: Mapping[str, str]) -> None:
        self._lines = lines
        self._op_defs: dict[str, Any] = {}
        self._specs: dict[str, OpSpec] = {}

    def __contains__(self, op_type: object) -> bool:
        return op_type in self._op_defs or op_type in self._lines

    def find_spec(self, op_type: str) -> OpSpec | None:
        """Return the operation of that name, None if it is unknown.

        Raises a ModelError if the model defines it with an argument of an unknown type.
        """
        if op_type not in self._specs and op_type in self._lines:
            self._specs[op_type] = _parse_table_line(op_type, self._lines[op_type])
        elif op_type not in self._specs and op_type in self._op_defs:
            self._specs[op_type] = _parse_op_def(self._op_defs[op_type])
        return self._specs.get(op_type)

    def with_op_defs(self, op_defs: Iterable[Any]) -> OpTable:
        """Return a table with these `OpDef` messages added. A known operation keeps its definition."""
        table = OpTable(self._lines)
        table._specs.update(self._specs)
        table._op_defs.update(self._op_defs)
        for op_def in op_defs:
            table._op_defs.setdefault(op_def.name, op_def)
        return table


@cache
def builtin_table() -> OpTable:
    """Return the operations that TensorFlow registers. The table is loaded once."""
    text = files(__package__).joinpath("opdefs.txt").read_text(encoding="utf-8")
    rows = (line.partition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return OpTable({name: rest for name, _, rest in rows})


def model_op_table(graph_def: Any, meta: Any) -> OpTable:
    """Return TensorFlow's operations, and a model's custom ones and functions, which nodes may use as operations."""
    custom_op_defs = meta.meta_info_def.stripped_op_list.op if meta is not None else ()
    signatures = (function.signature for function in graph_def.library.function)
    return builtin_table().with_op_defs([*custom_op_defs, *signatures])


def output_ports(node: Any, table: OpTable) -> list[tuple[str, int, str]]:
    """Return the outputs of a `NodeDef` in order: `node:1` in a graph is the second of them.

    Returns:
        For each port the argument's name, the port's index within the argument (in a function, a port is called
        `node:argument:index`), and its dtype's numpy-like name; a reference has the dtype of what it refers to.
    """
    if (spec := table.find_spec(node.op)) is None:
        raise ModelError(
            f"Node {node.name!r} is of an unknown operation, {node.op!r}."
            " A model with custom operations must be saved with their definitions."
        )
    return _expand_ports(node, spec, spec.outputs)


def _expand_ports(node: Any, spec: OpSpec, args: tuple[ArgSpec, ...]) -> list[tuple[str, int, str]]:
    ports: list[tuple[str, int, str]] = []
    for arg in args:
        dtypes, count = _port_dtypes(node, spec, arg), 1
        if arg.number_attr:
            count = _attr_value(node, spec, arg.number_attr, "i")
            if count < 0:
                raise ModelError(f"Node {node.name!r} ({node.op}): attribute {arg.number_attr!r} is negative, {count}.")
        if len(ports) + len(dtypes) * count > _MAX_PORTS:
            raise ModelError(f"Node {node.name!r} ({node.op}) claims more than {_MAX_PORTS} inputs or outputs.")
        ports.extend((arg.name, index, dtype) for index, dtype in enumerate(dtypes * count))
    return ports


def _port_dtypes(node: Any, spec: OpSpec, arg: ArgSpec) -> list[str]:
    """Return the types of an argument's ports: a list of them, or one, which repeats."""
    if arg.dtype:
        return [arg.dtype]
    attr, kind = (arg.type_list_attr, "list") if arg.type_list_attr else (arg.type_attr, "type")
    value = _attr_value(node, spec, attr, kind)
    if isinstance(value, str | tuple):  # a default of the table
        return [value] if isinstance(value, str) else list(value)
    dtypes = []
    for number in value.type if arg.type_list_attr else [value]:
        if (name := dtype_name(number)) is None:
            raise ModelError(f"Node {node.name!r} ({node.op}): attribute {attr!r} has unknown type {number}.")
        dtypes.append(name)
    return dtypes


def _attr_value(node: Any, spec: OpSpec, name: str, kind: str) -> Any:
    """Return an attribute's value from the message, or its default from the table."""
    if name in node.attr:
        value = node.attr[name]
        if value.WhichOneof("value") == kind:
            return getattr(value, kind)
    elif isinstance(default := spec.defaults.get(name), _DEFAULT_KINDS[kind]):
        return default
    raise ModelError(f"Node {node.name!r} ({node.op}) lacks a valid attribute {name!r}, which its ports depend on.")


def _parse_op_def(op_def: Any) -> OpSpec:
    inputs = tuple(_parse_arg_def(op_def, arg) for arg in op_def.input_arg)
    outputs = tuple(_parse_arg_def(op_def, arg) for arg in op_def.output_arg)
    referenced = {attr for arg in (*inputs, *outputs) for attr in (arg.type_attr, arg.number_attr, arg.type_list_attr)}
    defaults: dict[str, AttrDefault] = {}
    for attr in op_def.attr:
        if attr.name in referenced and attr.HasField("default_value"):
            value = attr.default_value
            match value.WhichOneof("value"):  # arguments refer to no other kinds
                case "list":
                    defaults[attr.name] = tuple(dtype_name(number) or "invalid" for number in value.list.type)
                case "type":
                    defaults[attr.name] = dtype_name(value.type) or "invalid"
                case _:
                    defaults[attr.name] = int(value.i)
    return OpSpec(op_def.name, inputs, outputs, op_def.is_stateful, defaults)


def _parse_arg_def(op_def: Any, arg: Any) -> ArgSpec:
    dtype = dtype_name(arg.type) or ""
    if not (dtype or arg.type_attr or arg.type_list_attr):
        raise ModelError(f"Operation {op_def.name!r}: argument {arg.name!r} has unknown type {arg.type}.")
    return ArgSpec(arg.name, dtype, arg.type_attr, arg.number_attr, arg.type_list_attr, arg.is_ref)


def _parse_table_line(name: str, rest: str) -> OpSpec:
    args, _, defaults = rest.partition("|")
    inputs_text, _, outputs_text = args.partition(">")
    return OpSpec(
        name,
        tuple(arg for word in inputs_text.removeprefix("!").split() for arg in _parse_arg_word(word)),
        tuple(arg for word in outputs_text.split() for arg in _parse_arg_word(word)),
        inputs_text.startswith("!"),
        dict(_parse_default_word(word) for word in defaults.split()),
    )


def _parse_arg_word(word: str) -> list[ArgSpec]:
    names, _, type_list = word.removesuffix("&").partition("@")
    names, _, dtype = names.partition("=")
    names, _, type_attr = names.partition(":")
    names, _, number = names.partition("*")
    return [ArgSpec(name, dtype, type_attr, number, type_list, word.endswith("&")) for name in names.split(",")]


def _parse_default_word(word: str) -> tuple[str, AttrDefault]:
    name, _, value = word.partition("=")
    if value.startswith("["):
        return name, tuple(value.strip("[]").split(",")) if value != "[]" else ()
    return name, int(value) if value.lstrip("-").isdigit() else value


_WEIGHTED_ROLES: Final = ("input", "weight")
_FUSED_ROLES: Final = ("input", "weight", "bias", "other")
_RANGE_ROLES: Final = ("input", "min", "max")
_NHWC: Final = {"data_format": "NHWC"}
_NDHWC: Final = {"data_format": "NDHWC"}
_MATMUL_DEFAULTS: Final = {"transpose_a": False, "transpose_b": False}
_FAKE_QUANT_DEFAULTS: Final = {"num_bits": 8, "narrow_range": False}
_QUANTIZE_DEQUANTIZE_DEFAULTS: Final = {
    "signed_input": True,
    "num_bits": 8,
    "range_given": False,
    "narrow_range": False,
    "axis": -1,
}

VARIABLE_OP_TYPES: Final = frozenset({"VarHandleOp", "VariableV2", "Variable"})
ASSIGN_TYPES: Final = frozenset(
    f"{name}{suffix}"
    for name in ("Assign", "AssignAdd", "AssignSub", "ScatterUpdate", "ScatterAdd", "ScatterSub")
    for suffix in ("", "VariableOp")
) | {f"ResourceScatter{name}" for name in ("Update", "Add", "Sub", "NdUpdate", "NdAdd")}
"""Types of ops that change the variable in their first input."""

_SAME_NAMES: Final = (
    "Sub Pow Relu Relu6 Sigmoid Tanh Softmax Softplus Erf Exp Log Sqrt Rsqrt Neg Abs LRN Pack Unpack Squeeze"
    " Cast Einsum"
)
"""Ops with inputs only, whose kind is their name in lower case."""

_KINDS_BY_ROLES: Final[Mapping[tuple[str, ...], Mapping[str, str]]] = {
    (): {"constant": "Const", "variable": " ".join(sorted(VARIABLE_OP_TYPES)), "input": "Placeholder PlaceholderV2"},
    ("input",): {
        **{name.lower(): name for name in _SAME_NAMES.split()},
        "add": "Add AddV2 AddN",
        "mul": "Mul MulNoNan",
        "div": "RealDiv Div DivNoNan",
        "max": "Maximum",
        "min": "Minimum",
        "leaky_relu": "LeakyRelu",
        "elu": "Elu Selu",
        "log_softmax": "LogSoftmax",
        "max_pool": "MaxPool MaxPool3D",
        "avg_pool": "AvgPool AvgPool3D",
        "shape": "Shape ShapeN Size Rank",
        "depth_to_space": "DepthToSpace",
        "space_to_depth": "SpaceToDepth",
        "top_k": "TopK",
        "identity": "Identity StopGradient Snapshot PreventGradient RefIdentity EnsureShape",
        "merge": "Merge RefMerge",
        "enter": "Enter RefEnter",
        "exit": "Exit RefExit",
        "next_iteration": "NextIteration RefNextIteration",
        "input": "PlaceholderWithDefault",
        "while": "While StatelessWhile",
        "call": "PartitionedCall StatefulPartitionedCall TPUPartitionedCall SymbolicGradient",
        "qdq": "QuantizeAndDequantize",
    },
    ("input", "axis"): {
        "reduce_mean": "Mean",
        "reduce_sum": "Sum",
        "reduce_max": "Max",
        "reduce_min": "Min",
        "arg_max": "ArgMax",
        "transpose": "Transpose",
        "unsqueeze": "ExpandDims",
    },
    ("input", "shape"): {
        "max_pool": "MaxPoolV2",
        "top_k": "TopKV2",
        "reshape": "Reshape",
        "expand": "BroadcastTo",
        "tile": "Tile",
        "pad": "Pad MirrorPad",
        "resize": "ResizeBilinear ResizeNearestNeighbor ResizeBicubic",
    },
    ("input", "shape", "axis"): {"split": "SplitV"},
    ("input", "shape", "other"): {"pad": "PadV2"},
    ("input", "indices"): {"slice": "Slice StridedSlice"},
    ("input", "indices", "axis"): {"gather": "Gather GatherV2 GatherNd"},
    ("input", "bias"): {"bias_add": "BiasAddV1"},
    ("input", "condition"): {"switch": "Switch RefSwitch"},
    _RANGE_ROLES: {"clip": "ClipByValue", "quantize": "QuantizeV2", "dequantize": "Dequantize"},
    ("axis", "input"): {"concat": "Concat", "split": "Split"},
    ("shape", "input"): {"expand": "Fill"},
    ("condition", "input"): {"where": "Select SelectV2", "if": "If StatelessIf Case StatelessCase"},
    ("condition",): {"loop_cond": "LoopCond"},
    ("other", "input"): {"call": "RemoteCall"},
    ("variable",): {"read_variable": "ReadVariableOp"},
    ("variable", "indices"): {"gather": "ResourceGather"},
}

_OP_INFOS: Final = {
    **{
        name: OpInfo(kind, roles)
        for roles, kinds in _KINDS_BY_ROLES.items()
        for kind, names in kinds.items()
        for name in names.split()
    },
    "Conv2D": OpInfo("conv", _WEIGHTED_ROLES, 3, _NHWC),
    "Conv3D": OpInfo("conv", _WEIGHTED_ROLES, 4, _NDHWC),
    "DepthwiseConv2dNative": OpInfo("depthwise_conv", _WEIGHTED_ROLES, 2, _NHWC),
    "Conv2DBackpropInput": OpInfo("conv_transpose", ("shape", "weight", "input"), 2, _NHWC),
    "Conv3DBackpropInputV2": OpInfo("conv_transpose", ("shape", "weight", "input"), 3, _NDHWC),
    "MatMul": OpInfo("matmul", _WEIGHTED_ROLES, 1, _MATMUL_DEFAULTS),
    **dict.fromkeys(
        ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"),
        OpInfo("matmul", _WEIGHTED_ROLES, -1, {"adj_x": False, "adj_y": False}),
    ),
    "_FusedConv2D": OpInfo("conv", _FUSED_ROLES, 3, _NHWC),
    "_FusedDepthwiseConv2dNative": OpInfo("depthwise_conv", _FUSED_ROLES, 2, _NHWC),
    "_FusedMatMul": OpInfo("matmul", _FUSED_ROLES, 1, _MATMUL_DEFAULTS),
    "BiasAdd": OpInfo("bias_add", ("input", "bias"), defaults=_NHWC),
    **dict.fromkeys(
        ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"),
        OpInfo(
            "batchnorm",
            ("input", "scale", "offset", "mean", "variance"),
            defaults={"is_training": True, "epsilon": 1e-4, **_NHWC},
        ),
    ),
    "FakeQuantWithMinMaxArgs": OpInfo("qdq", defaults={"min": -6.0, "max": 6.0, **_FAKE_QUANT_DEFAULTS}),
    "FakeQuantWithMinMaxVars": OpInfo("qdq", _RANGE_ROLES, defaults=_FAKE_QUANT_DEFAULTS),
    "FakeQuantWithMinMaxVarsPerChannel": OpInfo("qdq", _RANGE_ROLES, defaults=_FAKE_QUANT_DEFAULTS),
    **dict.fromkeys(
        ("QuantizeAndDequantizeV2", "QuantizeAndDequantizeV4"),
        OpInfo("qdq", _RANGE_ROLES, defaults={**_QUANTIZE_DEQUANTIZE_DEFAULTS, "round_mode": "HALF_TO_EVEN"}),
    ),
    "QuantizeAndDequantizeV3": OpInfo(
        "qdq", (*_RANGE_ROLES, "other"), defaults={**_QUANTIZE_DEQUANTIZE_DEFAULTS, "range_given": True}
    ),
}

_RANDOM_PREFIXES: Final = (
    "Random",
    "StatelessRandom",
    "TruncatedNormal",
    "ParameterizedTruncatedNormal",
    "Multinomial",
    "StatelessTruncated",
)

FUNCTION_ATTRS: Final[dict[str, dict[str, tuple[int | None, bool]]]] = {
    **{name: {"f": (0, False)} for name in ("PartitionedCall", "StatefulPartitionedCall", "TPUPartitionedCall")},
    **{name: {"then_branch": (1, False), "else_branch": (1, False)} for name in ("If", "StatelessIf")},
    **{name: {"branches": (1, False)} for name in ("Case", "StatelessCase")},
    # The condition reads the body's results in later iterations, so its inputs match no inputs of the op: no offset.
    **{name: {"cond": (None, True), "body": (0, True)} for name in ("While", "StatelessWhile")},
    "RemoteCall": {"f": (1, False)},
}
"""Attributes with functions, by op type: (offset, loop) of the `Call`. Functions in other attributes have no offset."""


def describe_tf_op(op_type: str, attr: Mapping[str, Any], input_count: int) -> OpInfo:
    """Return the properties of a node of that type, with these AttrValue messages and number of data inputs."""
    if op_type in _OP_INFOS:
        op_info = _OP_INFOS[op_type]
        if op_type == "MatMul" and "transpose_b" in attr and attr["transpose_b"].b:
            return op_info._replace(channel_axis=0)
        if op_info.channel_axis == -1 and "adj_y" in attr and attr["adj_y"].b:
            return op_info._replace(channel_axis=-2)
        return op_info
    if op_type == "ConcatV2":
        return OpInfo("concat", (*("input",) * (input_count - 1), "axis"))
    if op_type.startswith(_RANDOM_PREFIXES):
        return OpInfo("random")
    spec = builtin_table().find_spec(op_type)
    return OpInfo("stateful" if spec is not None and spec.is_stateful else "other")
