"""Edited plans against models: everything that cannot be is told, with the tensor, before anything is done."""

from dataclasses import replace

import onnx
import onnx.parser
import pytest
from support.plans import make_plan

from graphquant.errors import UsageError
from graphquant.formats.onnx import load
from graphquant.ir import TensorRef, Use
from graphquant.quantize import Site, check_plan, solve_scales
from graphquant.quantize.rewrite import rewrite
from graphquant.rules import Scheme

CONV = """
<ir_version: 8, opset_import: ["": 11]>
g (float[1,3,8,8] x, float16[2] h, bool p) => (float[1,4,8,8] y, float16[2] k, float[1,4,8,8] i)
<float[4,3,1,1] w = {1,2,3,4,5,6,7,8,9,1,2,3}>
{
    y = Conv (x, w)
    k = Neg (h)
    i = If (p) <
        then_branch = th () => (float[1,4,8,8] a) { a = Relu (y) },
        else_branch = el () => (float[1,4,8,8] b) { b = Neg (y) }
    >
}
"""
INT8 = Scheme(name="q", dtype="int8", family="onnx-qdq")
CHANNEL = replace(INT8, per="channel")
BLOCK = replace(INT8, per="block", block_size=2)
X, W = TensorRef("", "x"), TensorRef("", "w")
SITE = Site(tensor=X, uses=(Use("", "y", 0),), graph="", scheme=INT8, range=(-1.0, 1.0))
WEIGHT = Site(tensor=W, uses=(Use("", "y", 1),), graph="", scheme=INT8, parameter=True)


@pytest.fixture
def branched_model(tmp_path):
    """A convolution, a float16 op and two branches, at opset 11."""
    onnx.save(onnx.parser.parse_model(CONV), tmp_path / "model.onnx")
    return load(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("site", "said"),
    [
        (replace(SITE, tensor=TensorRef("", "gone")), "gone:0 is invalid: the model has no such tensor"),
        (replace(SITE, tensor=TensorRef("", "x", 1)), "x:1 is invalid: the model has no such tensor"),
        (replace(SITE, tensor=TensorRef("", "x", -1)), "x:-1 is invalid: the model has no such tensor"),
        (replace(SITE, tensor=TensorRef("none", "x")), "none/x:0 is invalid: the model has no such tensor"),
        (replace(SITE, graph="none"), "x:0 is invalid: there is no graph 'none' that can read it"),
        (replace(SITE, graph="i/then_branch"), "x:0 is invalid: y[0] cannot read graph 'i/then_branch'"),
        (replace(WEIGHT, scheme=BLOCK), "w:0 is invalid: its scheme is per block, but its axis is None"),
        (replace(WEIGHT, scheme=BLOCK, axis=4), "w:0 is invalid: it has no axis 4"),
        (replace(WEIGHT, scheme=BLOCK, axis=1), "its ops need opset 21, but the prepared model has 11"),
        (replace(SITE, scheme=BLOCK, axis=1), "x:0 is invalid: only weights can have blocks"),
        (replace(WEIGHT, scheme=replace(INT8, dtype="float8_e5m2")), "its ops need opset 19, but the prepared model"),
        (replace(SITE, uses=()), "x:0 is invalid: it has no uses, or a use twice"),
        (replace(SITE, uses=(Use("", "y", 0),) * 2), "x:0 is invalid: it has no uses, or a use twice"),
        (replace(SITE, uses=(Use("", "y", 1),)), "x:0 is invalid: y[1] does not read it"),
        (replace(SITE, uses=(Use("", "y", 10**30),)), "does not read it"),
        (replace(SITE, uses=(Use("", "y", -2),)), "x:0 is invalid: y[-2] does not read it"),
        (replace(SITE, uses=(Use("", "gone", 0),)), "x:0 is invalid: gone[0] does not read it"),
        (replace(SITE, uses=(Use("none", "y", 0),)), "x:0 is invalid: none/y[0] does not read it"),
        (replace(SITE, tie=(Use("", "gone", 0),)), "x:0 is invalid: it is tied to gone[0], which is not connected"),
        (replace(SITE, parameter=True), "x:0 is invalid: it is no parameter"),
        (replace(SITE, scheme=replace(INT8, family=None)), "x:0 is invalid: family None is not available for onnx"),
        (replace(SITE, scheme=replace(INT8, family="fake-quant")), "family 'fake-quant' is not available for onnx"),
        (replace(SITE, scheme=replace(INT8, dtype="int17")), "onnxruntime does not support int17"),
        (replace(SITE, scheme=replace(INT8, dtype="int32")), "onnxruntime does not support int32"),
        (replace(SITE, tensor=TensorRef("", "h"), uses=(Use("", "k", 0),)), "between float16 pairs in float"),
        (replace(SITE, scheme=CHANNEL), "x:0 is invalid: its scheme is per channel, but its axis is None"),
        (replace(SITE, axis=0), "x:0 is invalid: its scheme is per tensor, but its axis is 0"),
        (replace(WEIGHT, scheme=CHANNEL, axis=4), "w:0 is invalid: it has no axis 4"),
        (replace(WEIGHT, scheme=CHANNEL, axis=-1), "w:0 is invalid: it has no axis -1"),
        (replace(WEIGHT, scheme=CHANNEL, axis=0), "its ops need opset 13, but the prepared model has 11"),
        (replace(WEIGHT, scheme=CHANNEL, axis=1, scale=(1.0, 2.0)), "it has 3 channels, but the plan gives 2 scales"),
    ],
)
def test_invalid_sites(branched_model, site, said):
    """Each mistake is a UsageError of solve and of rewrite that names the tensor."""
    for act in (
        lambda: check_plan(branched_model, make_plan(site)),
        lambda: solve_scales(branched_model, make_plan(site), {}),
        lambda: rewrite(branched_model, make_plan(site), {}),
    ):
        with pytest.raises(UsageError) as raised:
            act()
        assert said in str(raised.value)


def test_all_mistakes_at_once_and_nothing_else(branched_model):
    """Every site with a mistake has a line; a use of two sites counts as one."""
    check_plan(branched_model, make_plan(SITE, WEIGHT))
    with pytest.raises(UsageError) as raised:
        check_plan(
            branched_model,
            make_plan(SITE, replace(SITE, scheme=replace(INT8, dtype="uint8")), replace(WEIGHT, uses=())),
        )
    assert str(raised.value).splitlines() == [
        "The plan's site of x:0 is invalid: another site has y[0] already.",
        "The plan's site of w:0 is invalid: it has no uses, or a use twice.",
        "Correct the plan, or create it again for this model.",
    ]


def test_a_parameter_may_be_treated_as_an_activation(branched_model):
    """A weight whose flag is off is quantized while the model runs, with the range that the plan gives."""
    site = replace(WEIGHT, parameter=False, range=(-9.0, 9.0))
    params = solve_scales(branched_model, make_plan(site), {}).params
    assert rewrite(branched_model, make_plan(site), params)[1][0].folded is False
