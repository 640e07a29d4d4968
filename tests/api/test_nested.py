"""The sample model with layers in a Loop, a Scan, an If and a function, beside a twin that has all in one graph."""

import importlib.util
from collections import defaultdict
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import graphquant as gq
from graphquant.backends import check_quantized_model
from graphquant.formats import onnx as onnx_format
from graphquant.ir import Use
from graphquant.observers import merge_sketches
from graphquant.quantize import solve_scales
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
    """Copies a graph without bodies and functions, and remembers which use each use is a copy of.

    Attributes:
        uses: For each (graph, op, slot) of the model the uses of the twin that stand for it.
        parts: For each op of the twin the graph of the model that its original is in.
    """

    def __init__(self, message):
        self.message = message
        self.functions = {function.name: function for function in message.functions}
        self.nodes, self.initializers = [], []
        self.uses, self.parts = defaultdict(list), {}
        self.handlers = {"Loop": self.loop, "Scan": self.scan, "If": self.branch, "Block": self.call}
        self.handlers["Constant"] = self.constant

    def run(self):
        """The twin."""
        graph = self.message.graph
        made = self.put(graph, "", "", {value.name: value.name for value in graph.input})
        assert made == [value.name for value in graph.output]
        flat = helper.make_graph(self.nodes, "flat", graph.input, graph.output, self.initializers)
        imports = [helper.make_opsetid("", 17)]
        return helper.make_model(flat, ir_version=self.message.ir_version, opset_imports=imports)

    def put(self, graph, label, prefix, names):
        """Copies the nodes of `graph`, called `label`; returns the copies of its outputs."""
        names = dict(names)
        for tensor in getattr(graph, "initializer", ()):
            names[tensor.name] = f"{prefix}{tensor.name}"
            self.initializers.append(numpy_helper.from_array(numpy_helper.to_array(tensor), names[tensor.name]))
        for node in graph.node:
            read = [names[name] if name else "" for name in node.input]
            name = f"{prefix}{node.name}"
            made = self.handlers.get(node.op_type, self.plain)(node, name, label, read, names)
            names.update(zip(node.output, made, strict=True))
        return [names[end if isinstance(end, str) else end.name] for end in graph.output]

    def plain(self, node, name, label, read, _names):
        """Copies a node; returns its outputs."""
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name, copy.input[:], copy.output[:] = name, read, [f"{name}:{k}" for k in range(len(node.output))]
        if not label:
            copy.output[:] = node.output
        self.nodes.append(copy)
        self.parts[name] = label
        for slot in range(len(read)):
            self.uses[label, node.name, slot].append(Use("", name, slot))
        return list(copy.output)

    def body(self, node, label, attr="body"):
        """A body of a node, and what graphquant calls it."""
        graph = next(attribute.g for attribute in node.attribute if attribute.name == attr)
        return graph, f"{label}/{node.name}/{attr}".removeprefix("/")

    def loop(self, node, name, label, read, names):
        """Copies the body for each round."""
        graph, inner = self.body(node, label)
        carried = read[2:]
        for number in range(2):
            start = {value.name: read for value, read in zip(graph.input[2:], carried, strict=True)}
            start |= {graph.input[1].name: "threshold"}  # whether to go on, which nothing reads in the end
            carried = self.put(graph, inner, f"{name}@{number}/", names | start)[1:]
        return carried

    def scan(self, node, name, label, read, names):
        """Copies the body for each row."""
        graph, inner = self.body(node, label)
        state = read[0]
        for row in range(8):
            index = f"{name}@{row}/index"
            self.initializers.append(numpy_helper.from_array(np.int64(row), index))
            part = f"{name}@{row}/part"
            self.nodes.append(helper.make_node("Gather", [read[1], index], [part], name=part, axis=2))
            given = {graph.input[0].name: state, graph.input[1].name: part}
            (state,) = self.put(graph, inner, f"{name}@{row}/", names | given)
        return [state]

    def call(self, node, name, label, read, _names):
        """Copies the function that is called."""
        function = self.functions[node.op_type]
        given = dict(zip(function.input, read, strict=True))
        return self.put(function, f"{node.domain}:{node.op_type}", f"{name}/", given)

    def branch(self, node, name, label, read, names):
        """Copies both branches, and chooses between what they make."""
        ends = []
        for slot, attr in enumerate(("then_branch", "else_branch"), start=1):
            graph, inner = self.body(node, label, attr)
            ends += self.put(graph, inner, "", names)
            self.uses[inner, f"@{graph.output[0].name}", 0].append(Use("", name, slot))
        self.nodes.append(helper.make_node("Where", [*read, *ends], list(node.output), name=name))
        self.parts[name] = label
        return list(node.output)

    def constant(self, node, name, *_):
        """Makes the value an initializer."""
        value = next(attribute.t for attribute in node.attribute)
        self.initializers.append(numpy_helper.from_array(numpy_helper.to_array(value), name))
        return [name]


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """The path of the twin, and what copied the model to it."""
    path = tmp_path_factory.mktemp("twin") / "flat.onnx"
    copier = Flattener(onnx.load(MODEL))
    onnx.save(copier.run(), path)
    onnx.checker.check_model(path, full_check=True)
    return path, copier


@pytest.fixture(scope="module")
def quantized():
    """The sample model, quantized by the default rules."""
    return gq.insert(MODEL, data=str(MODELS / "digits_nested_calib.npz"), validate=False)


def images(kind="eval"):
    """The images of a data file of the model."""
    return np.load(MODELS / f"digits_nested_{kind}.npz")["image"]


def run(model, level="ORT_ENABLE_ALL"):
    """A function that runs the model on images, a batch each."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    message = onnx_format.emit(model) if not isinstance(model, Path) else onnx.load(model)
    session = onnxruntime.InferenceSession(message.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda image: session.run(None, {"image": image})[0]


def test_the_twin_computes_the_same(twin):
    """Before anything is quantized the model and its twin agree bit by bit, in both branches."""
    one, other = run(MODEL, "ORT_DISABLE_ALL"), run(twin[0], "ORT_DISABLE_ALL")
    bright = images().mean(axis=(1, 2, 3)) > THRESHOLD
    for part in (images()[bright], images()[~bright]):
        assert np.array_equal(one(part), other(part))


@pytest.fixture(scope="module")
def observed(twin, tmp_path_factory):
    """The twin's plan, and for each tensor in it the sketch of what its original saw: branches see their own images."""
    path, copier = twin
    plan, calib = gq.plan(path), images("calib")
    bright = calib.mean(axis=(1, 2, 3)) > THRESHOLD
    parts = {"": calib, BODIES[2]: calib[bright], BODIES[3]: calib[~bright]}
    stats = {}
    for number, (part, some) in enumerate(parts.items()):
        data = tmp_path_factory.mktemp("data") / f"{number}.npz"
        np.savez(data, image=some)
        stats[part] = gq.calibrate(path, plan, str(data), full=False).sketches
    sketches = {
        site.tensor: stats.get(copier.parts.get(site.tensor.op, ""), stats[""])[site.tensor]
        for site in plan.sites
        if site.tensor in stats[""]
    }
    return plan, sketches


def groups(made, plan, copier):
    """For each site of the model the positions of the twin's sites that stand for it."""
    by_use = {use: index for index, site in enumerate(plan.sites) for use in site.uses}
    found = {}
    for index, site in enumerate(made.sites):
        copies = [copy for use in site.uses for copy in copier.uses[use.graph, use.op, use.slot]]
        assert all(copy in by_use for copy in copies), f"{site.tensor} has no site in the twin"
        found[index] = list(dict.fromkeys(by_use[copy] for copy in copies))
    return found


def test_bodies_are_quantized_as_the_twin_is(twin, quantized, observed):
    """The same uses are quantized; what is seen, scales and zero points are those of all copies; so are the outputs."""
    path, copier = twin
    plan, sketches = observed
    found = groups(quantized.plan, plan, copier)
    assert sorted(index for members in found.values() for index in members) == list(range(len(plan.sites)))
    for index, members in found.items():
        site = quantized.plan.sites[index]
        tensors = [plan.sites[member].tensor for member in members if plan.sites[member].tensor in sketches]
        assert bool(tensors) == (site.tensor in quantized.stats.sketches)
        if not tensors:
            continue
        together = sketches[tensors[0]]
        for tensor in dict.fromkeys(tensors[1:]):
            together = merge_sketches(together, sketches[tensor])
        for name in ("count", "low", "high", "bins", "counts", "sums"):
            mine, theirs = getattr(quantized.stats.sketches[site.tensor], name), getattr(together, name)
            assert np.array_equal(mine, theirs), f"{site.tensor}: {name}"
        sketches.update(dict.fromkeys(tensors, together))
    flat = gq.load(path)
    solution = solve_scales(flat, plan, sketches)
    done = {(item.site.tensor, item.site.uses): item.params for item in quantized.inserted}
    for index, members in found.items():
        site = quantized.plan.sites[index]
        for member in members:
            mine, theirs = done[site.tensor, site.uses], solution.params[member]
            assert np.array_equal(mine.scale, theirs.scale), site.tensor
            assert np.array_equal(mine.zero_point, theirs.zero_point), site.tensor
    other, _ = rewrite(flat, plan, solution.params)
    bright = images().mean(axis=(1, 2, 3)) > THRESHOLD
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        one, two = run(quantized.model, level), run(other, level)
        for part in (images()[bright], images()[~bright], images()[:1]):
            assert np.array_equal(one(part), two(part)), level


def test_bodies_run_on_integers(quantized, tmp_path):
    """In each body and in the function onnxruntime runs the convolution and a product on integers, as check says."""
    path = quantized.save(tmp_path / "quantized.onnx")
    written = onnx.load(path)
    actual = truth.runs_as(truth.optimized(path))
    actual = truth.of_functions(actual, [function.name for function in written.functions])
    report = check_quantized_model(gq.load(path), "onnxruntime")
    assert truth.differences(report.verdicts, actual) == []
    for body in BODIES:
        runs = {verdict.runs_as for verdict in report.verdicts if verdict.graph == body and verdict.status == "int8"}
        assert "QLinearConv" in runs
        assert runs & {"MatMulIntegerToFloat", "QGemm"}


def test_arguments_of_functions_are_stored(quantized):
    """A weight that a function is handed is stored in it, and the calls hand over nothing."""
    message = onnx_format.emit(quantized.model)
    assert [list(node.input) for node in message.graph.node if node.op_type == "Block"] == [
        ["rounds/features"],
        ["called/once"],
    ]
    assert "call/matrix" not in {tensor.name for tensor in message.graph.initializer}
    held = {node.output[0]: node for node in message.functions[0].node if node.op_type == "Constant"}
    assert numpy_helper.to_array(held["matrix/quant/int8"].attribute[0].t).shape == (8, 8)


@pytest.mark.parametrize("rules", ["onnxruntime", "weight_only_int4", "weight_only_int8", "qnn", "tensorrt", "generic"])
def test_a_branch_that_no_sample_took(rules, tmp_path):
    """Its activations are left with the reason; its weights are stored so that onnxruntime takes the model."""
    calib = images("calib")
    np.savez(tmp_path / "bright.npz", image=calib[calib.mean(axis=(1, 2, 3)) > THRESHOLD][:20])
    result = gq.insert(MODEL, rules=rules, data=str(tmp_path / "bright.npz"))
    left = [skip for skip in result.skips if "reached" in skip.reason]
    assert all(skip.tensor.graph in {BODIES[3], ""} for skip in left)
    assert bool(left) == (not rules.startswith("weight_only"))
    labels = np.load(MODELS / "digits_nested_eval.npz")["labels"]
    made = run(result.model)
    for part in (images().mean(axis=(1, 2, 3)) > THRESHOLD, images().mean(axis=(1, 2, 3)) <= THRESHOLD):
        assert (made(images()[part]).argmax(axis=1) == labels[part]).mean() > 0.9
