"""The framework-neutral vocabulary of op kinds and input roles, and the sets of kinds that several passes share.

The op tables of all formats and the rule files use these words. Add a description here for each new one.
"""

from __future__ import annotations

PSEUDO_KINDS = {
    "parameter": "any tensor whose value is known before the model runs",
    "computed": "any other tensor: its value depends on the inputs of the model",
    "tied": "a float32 table of picked rows that a matrix product reads, transposed or not",
    "stem": "a convolution above which no other op has a weight",
    "tail": "an op without a weight, and below which no op has one",
    "unnormalized": "an op between a signal and a normalization, proportional to the signal",
    "*": "any op",
}
"""Words that rule files may use in place of a kind, with their meaning. No op has one of them as its kind."""

KINDS = {
    **PSEUDO_KINDS,
    "conv": "convolution",
    "depthwise_conv": "convolution of each channel separately",
    "conv_transpose": "transposed convolution",
    "matmul": "matrix product, batched or not",
    "gemm": "matrix product plus bias",
    "fused_conv": "convolution with the activation after it, as one op",
    "fused_depthwise_conv": "convolution of each channel separately with the activation after it, as one op",
    "fused_matmul": "matrix product with transpositions and a factor, as one op",
    "fused_gemm": "matrix product plus bias with the activation after it, as one op",
    "bias_add": "addition of one value per channel",
    "add": "element-wise sum",
    "sub": "element-wise difference",
    "mul": "element-wise product",
    "div": "element-wise quotient",
    "pow": "element-wise power",
    "max": "element-wise maximum of its inputs",
    "min": "element-wise minimum of its inputs",
    "relu": "max(x, 0)",
    "relu6": "min(max(x, 0), 6)",
    "clip": "limits values to [min, max]",
    "leaky_relu": "relu with a fixed slope below 0",
    "prelu": "relu with a learned slope below 0",
    "elu": "exponential linear unit, scaled or not",
    "sigmoid": "1 / (1 + exp(-x))",
    "hard_sigmoid": "piecewise linear sigmoid",
    "tanh": "hyperbolic tangent",
    "softmax": "exp(x) normalized to sum 1",
    "log_softmax": "logarithm of softmax",
    "gelu": "Gaussian error linear unit",
    "silu": "x * sigmoid(alpha * x)",
    "hard_swish": "x * hard_sigmoid(x)",
    "softplus": "log(1 + exp(x))",
    "erf": "error function",
    "exp": "exponential",
    "log": "natural logarithm",
    "sqrt": "square root",
    "rsqrt": "1 / square root",
    "neg": "-x",
    "abs": "absolute value",
    "max_pool": "maximum over a window",
    "avg_pool": "mean over a window",
    "global_avg_pool": "mean over all positions",
    "batchnorm": "batch normalization",
    "layernorm": "layer normalization",
    "rmsnorm": "division by the root of the mean square",
    "instancenorm": "instance normalization",
    "groupnorm": "group normalization",
    "lrn": "local response normalization",
    "reduce_mean": "mean over axes",
    "reduce_sum": "sum over axes",
    "reduce_max": "maximum over axes",
    "reduce_min": "minimum over axes",
    "concat": "joins tensors along an axis",
    "split": "cuts a tensor along an axis",
    "slice": "a range of each axis",
    "gather": "rows picked by index",
    "embedding": "sum of rows picked by index, normalized, as one op",
    "reshape": "the same values in another shape",
    "flatten": "reshape to one or two axes",
    "transpose": "axes in another order",
    "squeeze": "drops axes of size 1",
    "unsqueeze": "adds axes of size 1",
    "expand": "broadcasts to a shape",
    "tile": "repeats a tensor along its axes",
    "pad": "adds a border",
    "resize": "interpolates to another size",
    "depth_to_space": "moves channels into positions",
    "space_to_depth": "moves positions into channels",
    "pack": "stacks tensors along a new axis",
    "unpack": "splits a tensor along an axis",
    "cast": "converts to another dtype",
    "shape": "the shape of a tensor",
    "where": "picks from two tensors by a condition",
    "arg_max": "index of the largest value",
    "top_k": "the k largest values",
    "attention": "mean of values, weighted by the softmax of queries times keys, as one op",
    "einsum": "sum of products in Einstein notation",
    "lstm": "long short-term memory, as one op",
    "gru": "gated recurrent unit, as one op",
    "rnn": "simple recurrent network, as one op",
    "moe": "mixture of experts, of which a router chooses some for each row",
    "if": "runs one of two graphs",
    "loop": "runs a graph a number of times",
    "scan": "runs a graph over the slices of its inputs",
    "while": "runs a graph while a condition holds",
    "call": "runs a function",
    "constant": "a value stored in the model",
    "variable": "a value stored outside of the graph",
    "read_variable": "the value of a variable",
    "identity": "its input, unchanged",
    "dropout": "identity, except in training",
    "enter": "into a loop frame",
    "exit": "out of a loop frame",
    "switch": "passes its input to one of two outputs",
    "merge": "the one of its inputs that exists",
    "next_iteration": "into the next iteration of a loop",
    "loop_cond": "the condition for another iteration of a loop",
    "quantize": "float to integer",
    "dequantize": "integer to float",
    "qdq": "quantizes and dequantizes in one op",
    "random": "random values",
    "stateful": "reads or changes state",
    "input": "an input of the graph",
    "output": "an output of the graph",
    "integer": "computes on integers, as QLinearConv and MatMulInteger do",
    "other": "anything without a kind of its own",
}
"""Every word that a rule file may use as a kind, with its meaning."""

RELU6_BOUNDS = (0.0, 6.0)  # limits of a clip that is a relu6

STORED_KINDS = frozenset({"constant", "variable"})
BOUNDARY_KINDS = frozenset({"input", "output"})
RESHAPING_KINDS = frozenset({"reshape", "squeeze", "unsqueeze", "transpose"})
"""Kinds that move values to other positions and change none."""

TRANSPARENT_KINDS = frozenset({"identity", "dropout"})  # kinds that compute nothing when a model is not trained

FORWARDING_KINDS = frozenset({"identity", "enter", "switch", "read_variable"})
"""Kinds whose output 0 (for "switch": each output) equals slot 0."""

MATRIX_PRODUCT_KINDS = frozenset({"matmul", "gemm"})
CONVOLUTION_KINDS = frozenset({"conv", "depthwise_conv"})
RECURRENT_KINDS = frozenset({"lstm", "gru", "rnn"})
LOOP_KINDS = frozenset({"loop", "scan", "while"})
BIAS_ADD_KINDS = frozenset({"add", "bias_add"})
COMMUTATIVE_KINDS = frozenset({"add", "mul", "max", "min"})

WEIGHTED_KINDS = MATRIX_PRODUCT_KINDS | CONVOLUTION_KINDS | {"conv_transpose"}
"""Kinds that multiply by one weight and sum. Runtimes fuse later ops into them."""

FUSED_PREFIX = "fused_"  # before the kind of the product that an op computes in addition to other things

MAC_KINDS = (
    WEIGHTED_KINDS
    | {kind for kind in KINDS if kind.startswith(FUSED_PREFIX)}
    | RECURRENT_KINDS
    | {"einsum", "attention", "moe"}
)
"""Kinds whose multiply-adds are counted. The multiplications of all other kinds are negligible."""

DATA_MOVEMENT_KINDS = RESHAPING_KINDS | {
    *("max_pool", "flatten", "slice", "expand", "tile", "gather", "depth_to_space", "space_to_depth", "split")
}
"""Kinds whose output values are input values."""

TABLE_KINDS = frozenset({"gather", "embedding"})  # kinds that pick rows of their inputs by index
CONCATENATING_KINDS = frozenset({"concat", "pack"})  # kinds whose output contains all of their inputs
VALUE_MOVING_KINDS = DATA_MOVEMENT_KINDS | CONCATENATING_KINDS | TRANSPARENT_KINDS | {"pad", "neg", "abs", "cast"}
AFFINE_KINDS = WEIGHTED_KINDS | {*("add", "sub", "mul", "div", "bias_add", "batchnorm")}  # affine with constants

BOUNDED_KINDS = frozenset({"sigmoid", "softmax", "tanh"})  # kinds whose result lies in [-1, 1], whatever the input
QUANTIZATION_KINDS = frozenset({"quantize", "dequantize", "qdq"})
"""Kinds that are quantization. Their inputs and outputs are not quantized again."""

NON_COMPUTE_KINDS = BOUNDARY_KINDS | STORED_KINDS | {"quantize", "dequantize"}
"""Kinds that compute nothing of the model's own."""

CLAMPING_KINDS = frozenset({"max", "min"})
"""Kinds that families add before a quantization whose type is narrower than its container."""

ROLES = {
    "input": "the data that the op computes on",
    "weight": "the weight of a convolution or matrix product",
    "bias": "the bias that the op adds",
    "routing": "the scores by which experts are chosen",
    "recurrent_weight": "the weight by which a recurrent op multiplies its state",
    "state": "the initial state of a recurrent op, or the past keys and values of attention",
    "slope": "the slope of prelu below 0",
    "mean": "mean of a normalization",
    "variance": "variance of a normalization",
    "scale": "scale of a normalization or a quantization",
    "offset": "offset of a normalization",
    "zero_point": "zero point of a quantization",
    "min": "lower limit",
    "max": "upper limit",
    "shape": "a shape",
    "axis": "an axis, or several",
    "indices": "indices or bounds along axes",
    "condition": "the condition of a choice",
    "count": "a number of items",
    "lengths": "length of each sequence",
    "like": "a tensor whose shape or type is used",
    "padding": "sizes of a border",
    "peephole": "peephole weights of an LSTM",
    "ratio": "share of values that dropout drops",
    "region": "region of interest of a resize",
    "repeats": "how often each axis is repeated",
    "sizes": "sizes along axes, or of parts",
    "training_mode": "true while the model is trained",
    "value": "the value that fills or replaces",
    "variable": "the handle of a variable",
    "other": "anything without a role of its own",
}
"""Every role that an input may have (`Op.roles`), with its meaning."""
