"""The work of ops by their shapes, and tables of costs."""

import numpy as np
import pytest
from support.cost_tables import write_cost_table
from support.onnx_models import load_onnx

from graphquant.backends.onnxruntime_costs import (
    CostTable,
    KernelWork,
    assume_input_shapes,
    describe_work,
    read_cost_table,
)
from graphquant.errors import UsageError
from graphquant.formats import InputSpec
from graphquant.ir import Parameters
from graphquant.rules.rule import SHIPPED_COSTS


def work_of(folder, text, op_type, **constants) -> KernelWork | None:
    """Return the work of the only op of a type in a model that is given as text."""
    values = {name: np.ones(shape, np.float32) for name, shape in constants.items()}
    model = load_onnx(folder, f"g {text}", values)
    op = next(op for op in model.main.ops() if op.type == op_type)
    return describe_work(model.main, op, Parameters(model))


def work_of_first(folder, text, output, **constants) -> KernelWork:
    """Return the work of the op that produces a value."""
    values = {name: np.ones(shape, np.float32) for name, shape in constants.items()}
    model = load_onnx(folder, f"g {text}", values)
    op = next(op for op in model.main.ops() if op.outputs and op.outputs[0].name == output)
    work = describe_work(model.main, op, Parameters(model))
    assert work is not None
    return work


CONV_CASES = {
    "dense": ("conv.dense", "[1, 8, 6, 6]", (20, 8, 3, 3), 1, 36 * 32 * 144, 36 * 32 * 72),
    "pointwise": ("conv.pointwise", "[1, 6, 6, 6]", (16, 6, 1, 1), 1, 36 * 16 * 16, 36 * 16 * 8),
    "first": ("conv.first", "[1, 3, 6, 6]", (16, 3, 3, 3), 1, 36 * 16 * 27, 36 * 16 * 28),
    "depthwise": ("conv.depthwise", "[1, 8, 6, 6]", (8, 1, 3, 3), 8, 36 * 16 * 9, 36 * 8 * 9),
    "grouped": ("conv.grouped", "[1, 16, 6, 6]", (16, 8, 1, 1), 2, 36 * 32 * 8, 36 * 32 * 8),
}


@pytest.mark.parametrize("producer", ["Relu()", "Sigmoid()", "Mul(x)"])
def test_convolution_behind_an_op_without_inputs(tmp_path, producer):
    """A missing input of the op before a convolution is no error."""
    text = f"(float[1, 8, 6, 6] x) => (float[1, 16, 6, 6] y) {{ r = {producer} y = Conv(r, w) }}"
    work = work_of(tmp_path, text, "Conv", w=(16, 8, 1, 1))
    assert work is not None
    assert work.kernel == "conv.pointwise"


def test_impossible_sizes_have_no_work(tmp_path):
    """Sizes whose product no memory holds, in a mutated model, give no work."""
    size = 1 << 62
    text = f"(float[{size}, {size}] x) => (float[{size}, {size}] y) {{ y = Relu(x) }}"
    assert work_of(tmp_path, text, "Relu") is None


@pytest.mark.parametrize("name", CONV_CASES)
def test_convolutions(tmp_path, name):
    """Channels count in blocks of 16, and products of int8 kernels in groups of 4; a free batch counts one sample."""
    kernel, shape, weight, groups, float_macs, int8_macs = CONV_CASES[name]
    pads = [weight[2] // 2] * 4
    for batch in (shape, shape.replace("[1", "[N")):
        text = f"(float{batch} x) => (float[N, {weight[0]}, 6, 6] y) {{ y = Conv<group={groups}, pads={pads}>(x, w) }}"
        work = work_of(tmp_path, text, "Conv", w=weight)
        assert work is not None
        assert work.kernel == kernel
        assert work.float_work["macs"] == float_macs
        assert work.int8_work["macs"] == int8_macs
        assert work.int8_work["outputs"] == 36 * weight[0]


def test_partial_blocks(tmp_path):
    """Channels that fill no block count on their own: in int8 depthwise kernels, and in narrow convolutions."""
    depthwise = "(float[1, 28, 6, 6] x) => (float[1, 28, 6, 6] y) { y = Conv<group=28, pads=[1, 1, 1, 1]>(x, w) }"
    work = work_of(tmp_path, depthwise, "Conv", w=(28, 1, 3, 3))
    assert work is not None
    assert (work.int8_work["half_blocks"], work.int8_work["rest"]) == (36 * 8, 36 * 4)
    assert work.float_work["outputs"] == 36 * 32
    pointwise = "(float[1, 28, 6, 6] x) => (float[1, 10, 6, 6] y) { y = Conv(x, w) }"
    work = work_of(tmp_path, pointwise, "Conv", w=(10, 28, 1, 1))
    assert work is not None
    assert work.int8_work["narrow"] == 36 * 10


@pytest.mark.parametrize(
    ("after", "reordered"), [("y = Conv(a, v)", 0), ("y = Tan(a)", 36 * 8), ("r = Relu(a) y = Tan(r)", 36 * 8)]
)
def test_reordered_values(tmp_path, after, reordered):
    """A float convolution reorders values for ops that do not run in its layout, also behind an activation."""
    body = f"x = Relu(z) a = Conv(x, w) {after}"
    text = f"(float[1, 8, 6, 6] z) => (float[1, 8, 6, 6] y) {{ b = Conv(z, u) c = Sigmoid(b) {body} }}"
    text = text.replace("Relu(z)", "Relu(c)")
    work = work_of_first(tmp_path, text, "a", w=(8, 8, 1, 1), u=(8, 8, 1, 1), v=(8, 8, 1, 1))
    assert work.float_work.get("reordered", 0) == reordered
    assert "reordered" not in work.int8_work


@pytest.mark.parametrize(
    ("shape", "kernel", "name", "copies"),
    [
        ([1, 3, 4, 6, 6], [3, 3, 3], "conv.dense.volume", 4 * 36 * 27),
        ([1, 8, 4, 6, 6], [1, 1, 1], "conv.pointwise.volume", None),
        ([1, 2, 36], [9], "conv.dense.line", 36),
    ],
)
def test_other_ranks(tmp_path, shape, kernel, name, copies):
    """Lines and volumes have kernels of their own. Int8 copies each position of a volume's kernel."""
    pads, output = [size // 2 for size in kernel] * 2, [1, 16, *shape[2:]]
    text = f"(float{shape} x) => (float{output} y) {{ y = Conv<pads={pads}>(x, w) }}"
    work = work_of(tmp_path, text, "Conv", w=(16, shape[1], *kernel))
    assert work is not None
    assert (work.kernel, work.int8_work.get("copies")) == (name, copies)


@pytest.mark.parametrize(
    ("body", "kernel", "split"),
    [
        ("y = HardSwish(a)", "hard_gate.blocked", ("hard_gate",)),
        ("g = HardSigmoid(a) y = Mul(a, g)", "hard_gate.blocked", ("hard_gate",)),
        ("e = Elu(a) y = HardSwish(e)", "hard_gate", ()),
        ('y = Resize<mode = "linear">(a, n, s)', "resize.linear.blocked", ("resize.linear",)),
        ('y = Resize<mode = "nearest">(a, n, s)', "resize", ()),
    ],
)
def test_ops_in_the_layout_of_convolutions(tmp_path, body, kernel, split):
    """An op that shares the layout of a float convolution has other kernels after an integer one."""
    text = f"(float[1, 8, 6, 6] x, float[4] s) => (float[1, 8, 6, 6] y) {{ a = Conv(x, w) {body} }}"
    work = work_of_first(tmp_path, text.replace("(a, n, s)", '(a, "", s)'), "y", w=(8, 8, 1, 1))
    assert (work.kernel, work.split_kernels) == (kernel, split)


@pytest.mark.parametrize(
    ("rows", "kernel", "macs"), [(1, "product.row", 16 * 10), (5, "product", 5 * 16 * 10), ("N", "product.row", 160)]
)
def test_products(tmp_path, rows, kernel, macs):
    """A product of one row has a kernel of its own. Sums of the int8 kernel count in groups of 4."""
    work = work_of(
        tmp_path, f"(float[{rows}, 10] x) => (float[{rows}, 12] y) {{ y = MatMul(x, w) }}", "MatMul", w=(10, 12)
    )
    assert work is not None
    assert (work.kernel, work.float_work["macs"]) == (kernel, macs)
    assert work.int8_work["macs"] == macs / 10 * 12
    assert work.float_work["weights"] == 120


def test_product_of_activations(tmp_path):
    """A stack of products of two activations counts each matrix."""
    text = "(float[2, 3, 8, 4] x, float[2, 3, 4, 16] z) => (float[2, 3, 8, 16] y) { y = MatMul(x, z) }"
    work = work_of(tmp_path, text, "MatMul")
    assert work is not None
    assert work.kernel == "product.activations"
    assert work.float_work["stack"] == 6
    assert work.float_work["macs"] == 6 * 8 * 16 * 4


def test_silu(tmp_path):
    """A SiLU that is one op has a kernel, also in the domain of ONNX Runtime; a product with a Sigmoid is a product."""
    joined = "(float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] y) { y = com.microsoft.QuickGelu<alpha = 1.0>(x) }"
    parts = "(float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] y) { s = Sigmoid(x) y = Mul(x, s) }"
    kernels = [work_of(tmp_path, joined, "QuickGelu"), *(work_of(tmp_path, parts, op) for op in ("Sigmoid", "Mul"))]
    assert [work.kernel for work in kernels if work] == ["silu", "sigmoid", "mul"]


def test_unknown_shapes(tmp_path):
    """A tensor of unknown rank has no work; an unknown size other than the batch is assumed."""
    text = "(float[1, 4, H, W] x) => (float[1, 4, H, W] y) { y = Sigmoid(x) }"
    work = work_of(tmp_path, text, "Sigmoid")
    assert work is not None
    assert work.float_work["values"] == 4 * 16 * 16
    assert (
        work_of(tmp_path, "(float x, int64[2] s) => (float y) { z = Reshape(x, s) y = Sigmoid(z) }", "Sigmoid") is None
    )


@pytest.mark.parametrize(
    ("op", "weight", "outputs"),
    [("Conv", (12, 8, 3, 3), 12 * 256), ("MatMul", (10, 12), 16 * 12), ("Gemm<transB=1>", (12, 10), 16 * 12)],
)
def test_known_weight(tmp_path, op, weight, outputs):
    """An op whose input has an unknown rank is estimated from the shape of its weight."""
    text = f"(float x, int64[r] s) => (float y) {{ z = Reshape(x, s) y = {op}(z, w) }}"
    work = work_of(tmp_path, text, op.partition("<")[0], w=weight)
    assert work is not None
    assert work.float_work["outputs"] == outputs


def test_usual_shapes():
    """Unknown sizes of inputs are those of images and of short sequences; known ones stay."""
    specs = [
        InputSpec(name="image", dtype="float32", shape=(None, 3, None, 96)),
        InputSpec(name="text", dtype="int64", shape=(None, None)),
        InputSpec(name="scalar", dtype="float32", shape=()),
        InputSpec(name="any", dtype="float32", shape=None),
    ]
    assert assume_input_shapes(specs) == {"image": (1, 3, 224, 96), "text": (1, 64), "scalar": ()}


def test_table(tmp_path):
    """A table that is written is read again; the costs of a kernel are those of its work."""
    table = CostTable(costs={"add float": {"ops": 5.0, "values": 0.25}}, machine="m", onnxruntime="1.0", threads=2)
    write_cost_table(table, tmp_path / "table.toml")
    assert read_cost_table(str(tmp_path / "table.toml")) == table
    assert table.nanoseconds("add float", {"ops": 1, "values": 8, "rows": 3}) == 7.0
    assert table.nanoseconds("sub float", {"ops": 1}) == 0.0
    assert not table.knows("add")


def test_shipped_table():
    """The shipped table has float and int8 costs of all kernels of convolutions and products, none negative."""
    table = read_cost_table(SHIPPED_COSTS)
    kernels = ("conv.dense", "conv.pointwise", "conv.first", "conv.depthwise", "conv.grouped", "conv.dense.line")
    kernels += ("conv.dense.volume", "conv.pointwise.volume", "conv.depthwise.volume")
    assert all(table.knows(kernel) for kernel in (*kernels, "product", "product.row", "product.activations"))
    assert all(cost > 0 for costs in table.costs.values() for cost in costs.values())
    assert {"quantize", "quantize.map", "dequantize", "dequantize.map"} <= table.costs.keys()


@pytest.mark.parametrize(("inputs", "outputs", "length"), [(48, 96, 1000), (96, 48, 1000), (256, 256, 128)])
def test_pointwise_convolutions_over_lines(tmp_path, inputs, outputs, length):
    """Integers take at most two thirds of float's time; they take 0.34 to 0.48 of it."""
    text = f"(float[1,{inputs},{length}] x) => (float y) {{ y = Conv (x, w) }}"
    work, table = work_of(tmp_path, text, "Conv", w=(outputs, inputs, 1)), read_cost_table(SHIPPED_COSTS)
    times = [table.nanoseconds(f"{work.kernel} {form}", getattr(work, f"{form}_work")) for form in ("int8", "float")]
    assert work.kernel == "conv.pointwise.line"
    assert times[0] < times[1] * 2 / 3


@pytest.mark.parametrize("content", [None, "costs = 3", "costs = {", b"\xff"])
def test_bad_tables(tmp_path, content):
    """A missing or invalid table is a mistake of the user."""
    path = tmp_path / "table.toml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError):
        read_cost_table(str(path))
