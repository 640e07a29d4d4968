"""The sample model with layers in a Loop, a Scan, an If and a function, compared with a flattened model."""

import importlib.util
from collections import defaultdict
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper, numpy_helper
from support.onnx_models import onnx_session
from support.plans import disable_costs

import graphquant as gq
from graphquant.backends import check_quantized_model
from graphquant.formats import onnx as onnx_format
from graphquant.ir import Use
from graphquant.observers import merge_sketches
from graphquant.quantize import SkipCode, solve_scales
from graphquant.quantize.rewrite import rewrite

SPEC = importlib.util.spec_from_file_location(
    "run_onnxruntime", Path(__file__).parents[1] / "backends/run_onnxruntime.py"
)
truth = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(truth)
MODELS = Path(__file__).resolve().parents[2] / "sample_models"
MODEL = MODELS / "digits_nested.onnx"
BODIES = ("rounds/features/body", "state/body", "features/then_branch", "features/else_branch", "sample_models:Block")
THRESHOLD = 0.29


class Flattener:
    """Copies a graph with its bodies and functions expanded, and records the origin of each use.

    Attributes:
        uses: Uses of the flattened model by the (graph, op, slot) of which they are copies.
        origin_graphs: Name of the original graph by op of the flattened model.
    """

    def __init__(self, message):
        self.message = message
        self.functions = {function.name: function for function in message.functions}
        self.nodes, self.initializers = [], []
        self.uses, self.origin_graphs = defaultdict(list), {}
        self.handlers = {"Loop": self.loop, "Scan": self.scan, "If": self.branch, "Block": self.call}
        self.handlers["Constant"] = self.constant

    def run(self):
        """Return the flattened model."""
        graph = self.message.graph
        outputs = self.expand(graph, "", "", {value.name: value.name for value in graph.input})
        assert outputs == [value.name for value in graph.output]
        flat = helper.make_graph(self.nodes, "flat", graph.input, graph.output, self.initializers)
        imports = [helper.make_opsetid("", 17)]
        return helper.make_model(flat, ir_version=self.message.ir_version, opset_imports=imports)

    def expand(self, graph, label, prefix, names):
        """Copy the nodes of `graph`, called `label`, and return the copies of its outputs."""
        names = dict(names)
        for tensor in getattr(graph, "initializer", ()):
            names[tensor.name] = f"{prefix}{tensor.name}"
            self.initializers.append(numpy_helper.from_array(numpy_helper.to_array(tensor), names[tensor.name]))
        for node in graph.node:
            read = [names[name] if name else "" for name in node.input]
            name = f"{prefix}{node.name}"
            copies = self.handlers.get(node.op_type, self.copy_node)(node, name, label, read, names)
            names.update(zip(node.output, copies, strict=True))
        return [names[output if isinstance(output, str) else output.name] for output in graph.output]

    def copy_node(self, node, name, label, read, _names):
        """Copy a node and return its outputs."""
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name, copy.input[:], copy.output[:] = name, read, [f"{name}:{k}" for k in range(len(node.output))]
        if not label:
            copy.output[:] = node.output
        self.nodes.append(copy)
        self.origin_graphs[name] = label
        for slot in range(len(read)):
            self.uses[label, node.name, slot].append(Use("", name, slot))
        return list(copy.output)

    def body(self, node, label, attr="body"):
        """Return a body of a node, and the name of its graph in graphquant."""
        graph = next(attribute.g for attribute in node.attribute if attribute.name == attr)
        return graph, f"{label}/{node.name}/{attr}".removeprefix("/")

    def loop(self, node, name, label, read, names):
        """Copy the body for each iteration."""
        graph, inner = self.body(node, label)
        carried = read[2:]
        for number in range(2):
            start = {value.name: read for value, read in zip(graph.input[2:], carried, strict=True)}
            start |= {graph.input[1].name: "threshold"}  # the loop condition, which nothing reads after flattening
            carried = self.expand(graph, inner, f"{name}@{number}/", names | start)[1:]
        return carried

    def scan(self, node, name, label, read, names):
        """Copy the body for each row."""
        graph, inner = self.body(node, label)
        state = read[0]
        for row in range(8):
            index = f"{name}@{row}/index"
            self.initializers.append(numpy_helper.from_array(np.int64(row), index))
            slice_name = f"{name}@{row}/part"
            self.nodes.append(helper.make_node("Gather", [read[1], index], [slice_name], name=slice_name, axis=2))
            arguments = {graph.input[0].name: state, graph.input[1].name: slice_name}
            (state,) = self.expand(graph, inner, f"{name}@{row}/", names | arguments)
        return [state]

    def call(self, node, name, label, read, _names):
        """Copy the called function."""
        function = self.functions[node.op_type]
        arguments = dict(zip(function.input, read, strict=True))
        return self.expand(function, f"{node.domain}:{node.op_type}", f"{name}/", arguments)

    def branch(self, node, name, label, read, names):
        """Copy both branches, and select between their outputs."""
        outputs = []
        for slot, attr in enumerate(("then_branch", "else_branch"), start=1):
            graph, inner = self.body(node, label, attr)
            outputs += self.expand(graph, inner, "", names)
            self.uses[inner, f"@{graph.output[0].name}", 0].append(Use("", name, slot))
        self.nodes.append(helper.make_node("Where", [*read, *outputs], list(node.output), name=name))
        self.origin_graphs[name] = label
        return list(node.output)

    def constant(self, node, name, *_):
        """Convert the value to an initializer."""
        value = next(attribute.t for attribute in node.attribute)
        self.initializers.append(numpy_helper.from_array(numpy_helper.to_array(value), name))
        return [name]


@pytest.fixture(scope="module", autouse=True)
def _no_costs():
    """Quantize all bodies, also where int8 does not pay."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        disable_costs(monkeypatch)
        yield


@pytest.fixture(scope="module")
def flattened(tmp_path_factory):
    """Return the path of the flattened model, and the copier with the origins."""
    path = tmp_path_factory.mktemp("flattened") / "flat.onnx"
    copier = Flattener(onnx.load(MODEL))
    onnx.save(copier.run(), path)
    onnx.checker.check_model(path, full_check=True)
    return path, copier


@pytest.fixture(scope="module")
def nested_result():
    """Return the sample model, quantized by the default rules."""
    return gq.insert(MODEL, data=str(MODELS / "digits_nested_calib.npz"), validate=False)


def nested_images(kind="eval"):
    """Return the images of a data file of the model."""
    return np.load(MODELS / f"digits_nested_{kind}.npz")["image"]


def classifier(model, level="ORT_ENABLE_ALL"):
    """Return a function that runs the model on a batch of images."""
    session = onnx_session(model, level)
    return lambda image: session.run(None, {"image": image})[0]


def test_flattened_float_model_is_equal(flattened):
    """The float models have bitwise equal outputs in both branches."""
    run_nested, run_flat = classifier(MODEL, "ORT_DISABLE_ALL"), classifier(flattened[0], "ORT_DISABLE_ALL")
    bright = nested_images().mean(axis=(1, 2, 3)) > THRESHOLD
    for batch in (nested_images()[bright], nested_images()[~bright]):
        assert np.array_equal(run_nested(batch), run_flat(batch))


@pytest.fixture(scope="module")
def flattened_stats(flattened, tmp_path_factory):
    """Return the plan of the flattened model and its sketches; those of branches have only the images of the branch."""
    path, copier = flattened
    plan, calib = gq.plan(path), nested_images("calib")
    bright = calib.mean(axis=(1, 2, 3)) > THRESHOLD
    images_by_graph = {"": calib, BODIES[2]: calib[bright], BODIES[3]: calib[~bright]}
    stats = {}
    for number, (graph, batch) in enumerate(images_by_graph.items()):
        data = tmp_path_factory.mktemp("data") / f"{number}.npz"
        np.savez(data, image=batch)
        stats[graph] = gq.calibrate(path, plan, str(data), full=False).sketches
    sketches = {
        site.tensor: stats.get(copier.origin_graphs.get(site.tensor.op, ""), stats[""])[site.tensor]
        for site in plan.sites
        if site.tensor in stats[""]
    }
    return plan, sketches


def match_sites(nested_plan, plan, copier):
    """Return for each site of the nested model the positions of its copies in the plan of the flattened model."""
    by_use = {use: index for index, site in enumerate(plan.sites) for use in site.uses}
    positions = {}
    for index, site in enumerate(nested_plan.sites):
        copies = [copy for use in site.uses for copy in copier.uses[use.graph, use.op, use.slot]]
        assert all(copy in by_use for copy in copies), f"{site.tensor} has no site in the flattened model"
        positions[index] = list(dict.fromkeys(by_use[copy] for copy in copies))
    return positions


def test_bodies_are_quantized_like_the_flattened_model(flattened, nested_result, flattened_stats):
    """Uses, sketches, scales and zero points in bodies equal those of their copies, and outputs are bitwise equal."""
    path, copier = flattened
    plan, sketches = flattened_stats
    positions = match_sites(nested_result.plan, plan, copier)
    assert sorted(index for members in positions.values() for index in members) == list(range(len(plan.sites)))
    for index, members in positions.items():
        site = nested_result.plan.sites[index]
        tensors = [plan.sites[member].tensor for member in members if plan.sites[member].tensor in sketches]
        assert bool(tensors) == (site.tensor in nested_result.stats.sketches)
        if not tensors:
            continue
        merged = sketches[tensors[0]]
        for tensor in dict.fromkeys(tensors[1:]):
            merged = merge_sketches(merged, sketches[tensor])
        for name in ("count", "low", "high", "bins", "counts", "sums"):
            actual, expected = getattr(nested_result.stats.sketches[site.tensor], name), getattr(merged, name)
            assert np.array_equal(actual, expected), f"{site.tensor}: {name}"
        sketches.update(dict.fromkeys(tensors, merged))
    flat = gq.load(path)
    solution = solve_scales(flat, plan, sketches)
    params = {(insertion.site.tensor, insertion.site.uses): insertion.params for insertion in nested_result.inserted}
    for index, members in positions.items():
        site = nested_result.plan.sites[index]
        for member in members:
            actual, expected = params[site.tensor, site.uses], solution.params[member]
            assert np.array_equal(actual.scale, expected.scale), site.tensor
            assert np.array_equal(actual.zero_point, expected.zero_point), site.tensor
    flat_quantized, _ = rewrite(flat, plan, solution.params)
    bright = nested_images().mean(axis=(1, 2, 3)) > THRESHOLD
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        run_nested, run_flat = classifier(nested_result.model, level), classifier(flat_quantized, level)
        for batch in (nested_images()[bright], nested_images()[~bright], nested_images()[:1]):
            assert np.array_equal(run_nested(batch), run_flat(batch)), level


def test_bodies_run_on_integers(nested_result, tmp_path):
    """Onnxruntime runs the convolution and a product of each body and the function on integers, as predicted."""
    path = nested_result.save(tmp_path / "quantized.onnx")
    written = onnx.load(path)
    actual = truth.runs_as(truth.optimized(path))
    actual = truth.of_functions(actual, [function.name for function in written.functions])
    report = check_quantized_model(gq.load(path), "onnxruntime")
    assert truth.differences(report.verdicts, actual) == []
    for body in BODIES:
        runs = {verdict.runs_as for verdict in report.verdicts if verdict.graph == body and verdict.status == "int8"}
        assert "QLinearConv" in runs or "QLinearConv" not in actual.values()  # older releases leave the bias float
        assert runs & {"MatMulIntegerToFloat", "QGemm", "QLinearMatMul"}


def test_arguments_of_functions_are_stored(nested_result):
    """A weight that is passed to a function is stored in it, and the calls do not pass it."""
    message = onnx_format.emit(nested_result.model)
    assert [list(node.input) for node in message.graph.node if node.op_type == "Block"] == [
        ["rounds/features"],
        ["called/once"],
    ]
    assert "call/matrix" not in {tensor.name for tensor in message.graph.initializer}
    constants = {node.output[0]: node for node in message.functions[0].node if node.op_type == "Constant"}
    assert numpy_helper.to_array(constants["matrix/quant/int8"].attribute[0].t).shape == (8, 8)


@pytest.mark.parametrize("rules", ["onnxruntime", "weight_only_int4", "weight_only_int8", "qnn", "tensorrt", "generic"])
def test_branch_that_no_sample_reaches(rules, tmp_path):
    """Its activations stay float with the reason, and onnxruntime runs it."""
    calib = nested_images("calib")
    np.savez(tmp_path / "bright.npz", image=calib[calib.mean(axis=(1, 2, 3)) > THRESHOLD][:20])
    result = gq.insert(MODEL, rules=rules, data=str(tmp_path / "bright.npz"))
    unreached = [skip for skip in result.skips if skip.code is SkipCode.RANGE]
    assert all(skip.tensor.graph in {BODIES[3], ""} for skip in unreached)
    assert bool(unreached) == (not rules.startswith("weight_only"))
    labels = np.load(MODELS / "digits_nested_eval.npz")["labels"]
    run_quantized = classifier(result.model)
    for mask in (nested_images().mean(axis=(1, 2, 3)) > THRESHOLD, nested_images().mean(axis=(1, 2, 3)) <= THRESHOLD):
        assert (run_quantized(nested_images()[mask]).argmax(axis=1) == labels[mask]).mean() > 0.9


def test_weights_in_a_branch_that_no_sample_reaches(tmp_path):
    """A branch without ranges keeps its weights float, also one that a reached op reads, so check has no finding."""
    text = """<ir_version: 8, opset_import: ["": 13]> g (float[2,8,6,6] x, bool rare) => (float[2,8,6,6] y) {
        a = Conv(x, shared) r = Relu(a)
        z = If (rare) <
            then_branch = yes () => (float[2,8,6,6] t) { d = Conv(r, own) e = Relu(d) h = Conv(e, shared) t = Relu(h) },
            else_branch = no () => (float[2,8,6,6] f) { i = Conv(r, other) f = Relu(i) }>
        y = Conv(z, last)
    }"""
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    for name in ("shared", "own", "other", "last"):
        weight = rng.normal(size=(8, 8, 1, 1)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weight, name))
    onnx.save(model, tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(16, 2, 8, 6, 6)).astype(np.float32), rare=np.zeros(16, bool))
    result = gq.insert(tmp_path / "net.onnx", data=f"{tmp_path / 'data.npz'}", rules="onnxruntime")
    uses = {inserted.site.tensor.op: {use.graph for use in inserted.site.uses} for inserted in result.inserted}
    skips = {(skip.tensor.op, use.graph) for skip in result.skips for use in skip.uses if skip.code == SkipCode.RANGE}
    assert uses["shared"] == {""}
    assert uses["other"] == {"z/else_branch"}
    assert {("own", "z/then_branch"), ("shared", "z/then_branch")} <= skips
    assert check_quantized_model(result.model, "onnxruntime").findings == ()
