"""TFLite's int8 ops in numpy: the expected output of each op for the runtime's own inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensorflow.lite.python import schema_py_generated as schema

Array = np.ndarray[Any, Any]

OPTIONS = {
    "CONV_2D": "Conv2DOptions",
    "DEPTHWISE_CONV_2D": "DepthwiseConv2DOptions",
    "FULLY_CONNECTED": "FullyConnectedOptions",
    "AVERAGE_POOL_2D": "Pool2DOptions",
    "MAX_POOL_2D": "Pool2DOptions",
    "ADD": "AddOptions",
    "SUB": "SubOptions",
    "MUL": "MulOptions",
    "CONCATENATION": "ConcatenationOptions",
    "SOFTMAX": "SoftmaxOptions",
    "PACK": "PackOptions",
}

NAMES = {value: name for name, value in vars(schema.BuiltinOperator).items() if isinstance(value, int)}


class Simulation:
    """A model that the interpreter ran with all tensors preserved."""

    def __init__(self, data: bytes, interpreter: Any) -> None:
        self.model = schema.Model.GetRootAs(data, 0)
        self.graph = self.model.Subgraphs(0)
        self.details = {detail["index"]: detail for detail in interpreter.get_tensor_details()}
        self.interpreter = interpreter

    def real(self, index: int) -> Array:
        """Return a tensor in real units, float64."""
        detail = self.details[index]
        value = self.interpreter.get_tensor(index)
        params = detail["quantization_parameters"]
        if not params["scales"].size:
            return value.astype(np.float64) if value.dtype.kind == "f" else value
        scale, zero = params["scales"].astype(np.float64), params["zero_points"]
        if scale.size > 1:
            wide = [1] * value.ndim
            wide[params["quantized_dimension"]] = -1
            scale, zero = scale.reshape(wide), zero.reshape(wide)
        return (value.astype(np.float64) - zero) * scale

    def steps(self) -> list[tuple[str, str, float]]:
        """Return name, type and largest distance in steps between runtime and simulation for each int8 op."""
        steps_by_name = []
        for number in range(self.graph.OperatorsLength()):
            op = self.graph.Operators(number)
            code = self.model.OperatorCodes(op.OpcodeIndex())
            name = NAMES[max(code.BuiltinCode(), code.DeprecatedBuiltinCode())]
            output = int(op.Outputs(0))
            inputs = [self.real(int(i)) if i >= 0 else None for i in op.InputsAsNumpy()]
            params = self.details[output]["quantization_parameters"]
            if not params["scales"].size:
                continue
            real = self.run(name, op, inputs)
            scale, zero = params["scales"][0].astype(np.float64), params["zero_points"][0]
            simulated = np.clip(np.floor(real / scale + 0.5) + zero, -128, 127)
            actual = self.interpreter.get_tensor(output).astype(np.float64)
            assert simulated.shape == actual.shape, name
            steps_by_name.append((self.details[output]["name"], name, float(np.abs(simulated - actual).max())))
        return steps_by_name

    def run(self, name: str, op: Any, inputs: list[Any]) -> Array:
        """Compute the op in float64, with its fused activation."""
        options = None
        if name in OPTIONS:
            options = getattr(schema, OPTIONS[name])()
            options.Init(op.BuiltinOptions().Bytes, op.BuiltinOptions().Pos)
        result = getattr(self, name.lower())(options, *inputs)
        fused = options.FusedActivationFunction() if hasattr(options, "FusedActivationFunction") else 0
        return {0: lambda x: x, 1: lambda x: np.maximum(x, 0), 3: lambda x: np.clip(x, 0, 6)}[fused](result)

    # -- ops, with their options first ----------------------------------------------------------------

    @staticmethod
    def windows(x: Array, size: tuple[int, int], options: Any, fill: float) -> Array:
        """Return patches (n, h, w, c, kh, kw) for the options' padding and strides."""
        strides = (options.StrideH(), options.StrideW())
        wide = (getattr(options, "DilationHFactor", lambda: 1)(), getattr(options, "DilationWFactor", lambda: 1)())
        reach = [(k - 1) * d + 1 for k, d in zip(size, wide, strict=True)]
        pads = [(0, 0)]
        for length, r, s in zip(x.shape[1:3], reach, strides, strict=True):
            total = max((-(-length // s) - 1) * s + r - length, 0) if options.Padding() == 0 else 0
            pads.append((total // 2, total - total // 2))
        padded = np.pad(x, [*pads, (0, 0)], constant_values=fill)
        windows = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=(1, 2))
        return windows[:, :: strides[0], :: strides[1], :, :: wide[0], :: wide[1]]

    def conv_2d(self, options: Any, x: Array, w: Array, bias: Array | None) -> Array:
        """Weights are (o, h, w, i)."""
        patches = self.windows(x, w.shape[1:3], options, 0)
        return np.einsum("nhwcij,oijc->nhwo", patches, w, optimize=True) + (0 if bias is None else bias)

    def depthwise_conv_2d(self, options: Any, x: Array, w: Array, bias: Array | None) -> Array:
        """Weights are (1, h, w, c * m)."""
        patches = self.windows(x, w.shape[1:3], options, 0)
        kernel = w[0].reshape(*w.shape[1:3], x.shape[-1], -1)
        result = np.einsum("nhwcij,ijcm->nhwcm", patches, kernel, optimize=True)
        return result.reshape(*result.shape[:3], -1) + (0 if bias is None else bias)

    @staticmethod
    def fully_connected(options: Any, x: Array, w: Array, bias: Array | None) -> Array:
        """Weights are (o, i)."""
        rows = x if options.KeepNumDims() else x.reshape(-1, w.shape[1])
        return rows @ w.T + (0 if bias is None else bias)

    def average_pool_2d(self, options: Any, x: Array) -> Array:
        """The border does not count."""
        size = (options.FilterHeight(), options.FilterWidth())
        total = self.windows(x, size, options, 0).sum((-2, -1))
        return total / self.windows(np.ones_like(x), size, options, 0).sum((-2, -1))

    def max_pool_2d(self, options: Any, x: Array) -> Array:
        """The border does not count."""
        return self.windows(x, (options.FilterHeight(), options.FilterWidth()), options, -np.inf).max((-2, -1))

    @staticmethod
    def add(_options: Any, x: Array, y: Array) -> Array:
        """Sum."""
        return x + y

    @staticmethod
    def mul(_options: Any, x: Array, y: Array) -> Array:
        """Product."""
        return x * y

    @staticmethod
    def concatenation(options: Any, *parts: Array) -> Array:
        """Joined."""
        return np.concatenate(parts, options.Axis())

    @staticmethod
    def mean(_options: Any, x: Array, axes: Array) -> Array:
        """Mean over axes; the output's shape shows if they are retained, as the order is the same."""
        return x.mean(tuple(int(axis) for axis in np.atleast_1d(axes)))

    @staticmethod
    def reduce_max(_options: Any, x: Array, axes: Array) -> Array:
        """Maximum over axes."""
        return x.max(tuple(int(axis) for axis in np.atleast_1d(axes)))

    @staticmethod
    def softmax(options: Any, x: Array) -> Array:
        """Along the last axis."""
        power = np.exp(options.Beta() * (x - x.max(-1, keepdims=True)))
        return power / power.sum(-1, keepdims=True)

    @staticmethod
    def logistic(_options: Any, x: Array) -> Array:
        """Sigmoid."""
        return 1 / (1 + np.exp(-x))

    @staticmethod
    def tanh(_options: Any, x: Array) -> Array:
        """Hyperbolic tangent."""
        return np.tanh(x)

    @staticmethod
    def reshape(_options: Any, x: Array, shape: Array) -> Array:
        """Another shape."""
        return x.reshape(shape)

    @staticmethod
    def expand_dims(_options: Any, x: Array, axis: Array) -> Array:
        """One more axis."""
        return np.expand_dims(x, int(axis))

    @staticmethod
    def pad(_options: Any, x: Array, sizes: Array) -> Array:
        """A border of zeros."""
        return np.pad(x, sizes)

    @staticmethod
    def gather(_options: Any, x: Array, indices: Array) -> Array:
        """Rows."""
        return x[indices]

    @staticmethod
    def quantize(_options: Any, x: Array) -> Array:
        """Requantize the same numbers with another scale."""
        return x
