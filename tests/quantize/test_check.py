"""Edited plans against models: everything that cannot be is told, with the tensor, before anything is done."""

import re
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
        (replace(SITE, tensor=TensorRef("", "gone")), "of gone:0 .*such tensor"),
        (replace(SITE, tensor=TensorRef("", "x", 1)), "of x:1 .*such tensor"),
        (replace(SITE, tensor=TensorRef("", "x", -1)), "of x:-1 .*such tensor"),
        (replace(SITE, tensor=TensorRef("none", "x")), "of none/x:0 .*such tensor"),
        (replace(SITE, graph="none"), "of x:0 .*'none'"),
        (replace(SITE, graph="i/then_branch"), r"of x:0 .*y\[0\] .*'i/then_branch'"),
        (replace(WEIGHT, scheme=BLOCK), "of w:0 .*per block,.* None"),
        (replace(WEIGHT, scheme=BLOCK, axis=4), "of w:0 .*axis 4"),
        (replace(WEIGHT, scheme=BLOCK, axis=1), "of w:0 .*opset 21,.* 11"),
        (replace(SITE, scheme=BLOCK, axis=1), "of x:0 .*weights .*blocks"),
        (replace(WEIGHT, scheme=replace(INT8, dtype="float8_e5m2")), "of w:0 .*opset 19,.* 11"),
        (replace(SITE, uses=()), "of x:0 .*no uses"),
        (replace(SITE, uses=(Use("", "y", 0),) * 2), "of x:0 .*use twice"),
        (replace(SITE, uses=(Use("", "y", 1),)), r"of x:0 .*: y\[1\] .*read it"),
        (replace(SITE, uses=(Use("", "y", 10**30),)), rf"of x:0 .*: y\[{10**30}\] .*read it"),
        (replace(SITE, uses=(Use("", "y", -2),)), r"of x:0 .*: y\[-2\] .*read it"),
        (replace(SITE, uses=(Use("", "gone", 0),)), r"of x:0 .*: gone\[0\] .*read it"),
        (replace(SITE, uses=(Use("none", "y", 0),)), r"of x:0 .*: none/y\[0\] .*read it"),
        (replace(SITE, tie=(Use("", "gone", 0),)), r"of x:0 .*tied to gone\[0\]"),
        (replace(SITE, parameter=True), "of x:0 .*'parameter'"),
        (replace(SITE, scheme=replace(INT8, family=None)), "of x:0 .*family None .*onnx"),
        (replace(SITE, scheme=replace(INT8, family="fake-quant")), "of x:0 .*family 'fake-quant' .*onnx"),
        (replace(SITE, scheme=replace(INT8, dtype="int32")), "of x:0 .*onnxruntime .*int32"),
        (replace(SITE, tensor=TensorRef("", "h"), uses=(Use("", "k", 0),)), "of h:0 .*float16"),
        (replace(SITE, scheme=CHANNEL), "of x:0 .*per channel,.* None"),
        (replace(SITE, axis=0), "of x:0 .*per tensor,.* 0"),
        (replace(WEIGHT, scheme=CHANNEL, axis=4), "of w:0 .*axis 4"),
        (replace(WEIGHT, scheme=CHANNEL, axis=-1), "of w:0 .*axis -1"),
        (replace(WEIGHT, scheme=CHANNEL, axis=0), "of w:0 .*opset 13,.* 11"),
        (replace(WEIGHT, scheme=CHANNEL, axis=1, scale=(1.0, 2.0)), "of w:0 .*3 channels,.* 2 scales"),
    ],
)
def test_invalid_sites(branched_model, site, said):
    """Each mistake is a UsageError of solve that names the tensor."""
    for act in (
        lambda: check_plan(branched_model, make_plan(site)),
        lambda: solve_scales(branched_model, make_plan(site), {}),
    ):
        with pytest.raises(UsageError) as raised:
            act()
        assert re.search(said, str(raised.value))


def test_all_mistakes_at_once_and_nothing_else(branched_model):
    """Every site with a mistake has a line; a use of two sites counts as one."""
    check_plan(branched_model, make_plan(SITE, WEIGHT))
    with pytest.raises(UsageError) as raised:
        check_plan(
            branched_model,
            make_plan(SITE, replace(SITE, scheme=replace(INT8, dtype="uint8")), replace(WEIGHT, uses=())),
        )
    lines = str(raised.value).splitlines()
    assert [re.findall(r"site of (\S+)", line) for line in lines] == [["x:0"], ["w:0"], []]
    assert "y[0]" in lines[0]
    assert "no uses" in lines[1]


def test_a_parameter_may_be_treated_as_an_activation(branched_model):
    """A weight whose flag is off is quantized while the model runs, with the range that the plan gives."""
    site = replace(WEIGHT, parameter=False, range=(-9.0, 9.0))
    params = solve_scales(branched_model, make_plan(site), {}).params
    assert rewrite(branched_model, make_plan(site), params)[1][0].folded is False
