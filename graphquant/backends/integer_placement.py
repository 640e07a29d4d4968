"""Decide which ops of a plan run in int8 on ONNX Runtime's CPU kernels, and which are estimated to be faster in float.

ONNX Runtime runs an op on integers if all its data inputs are dequantized and its output is quantized. Otherwise the op
runs in float, after the conversion of its inputs. The decision minimizes the estimated time of all ops and conversions.
It takes time proportional to the number of ops and edges, and measures nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from graphquant.backends.findings import Verdict
from graphquant.backends.onnxruntime_conditions import CONDITIONS
from graphquant.backends.onnxruntime_costs import CostTable, KernelWork, count_values, describe_work
from graphquant.ir import (
    BIAS_ADD_KINDS,
    FLOAT_TYPES,
    MATRIX_PRODUCT_KINDS,
    STORED_KINDS,
    WEIGHTED_KINDS,
    Graph,
    Model,
    Op,
    OpKey,
    Parameters,
    TensorRef,
    Use,
    connected_groups,
)
from graphquant.numerics import FloatType
from graphquant.quantize import Plan, Site, Skip, SkipCode

COST_RULE = "cost"
"""Rule of the skips of ops that are faster in float."""

INT8_ADVANTAGE = 0.95
"""Factor of estimated int8 times. Estimates are uncertain, and processors differ, so near equality int8 is kept."""

MAX_ROUNDS = 4  # rounds of the search for a better placement; most models need two
BYTE_BITS = 8
CLAMP_KINDS = frozenset({"relu", "relu6", "clip"})  # kinds that a product limits its output by
QUANTIZE, DEQUANTIZE = "quantize", "dequantize"

WorkTotals = Counter[tuple[str, str]]
"""Amounts by kernel ("conv.dense int8") and name of the work."""


@dataclass(slots=True, kw_only=True)
class FusedOps:
    """Ops that run as one: an op, and the bias or activation that ONNX Runtime fuses into it."""

    members: list[OpKey]
    work: KernelWork | None = None
    has_int8_kernel: bool = False  # True if the plan lets it run on integers
    quantized_output: bool = False  # True if its int8 kernel writes integers; some products write floats
    fixed: bool = False  # True if the plan quantizes it in another way than to 8 bits
    has_weight: bool = False
    reads: list[int] = field(default_factory=list)  # indices of the tensors that it reads
    writes: list[int] = field(default_factory=list)  # indices of the tensors that it writes


@dataclass(slots=True, kw_only=True)
class Activation:
    """A tensor between two of the fused groups of ops."""

    tensor: TensorRef
    producer: int
    readers: list[int] = field(default_factory=list)
    values: float = 0.0
    is_map: bool = False  # True for feature maps, whose layout differs between float and int8

    def conversion(self, name: str) -> str:
        """Return the kernel of a conversion."""
        return f"{name}.map" if self.is_map else name


class Placement:
    """The fused ops of a prepared model, the tensors between them, and the ops that a plan lets run on integers."""

    def __init__(self, model: Model, plan: Plan) -> None:
        """Examine `model` and its plan. Every op that can run on integers does."""
        self.model, self.plan, self.parameters = model, plan, Parameters(model)
        self.site_by_use = {use: site for site in plan.sites for use in site.uses}
        self._fused_uses = {use for skip in plan.skips if skip.fused for use in skip.uses}
        self.groups: list[FusedOps] = []
        self.tensors: list[Activation] = []
        self.group_by_op: dict[OpKey, int] = {}
        self._tensor_index: dict[TensorRef, int] = {}
        graphs = [model.graphs[name] for name in model.reachable_graphs()]
        for graph in graphs:
            for name in graph.topological_order():
                if graph.op(name).kind not in STORED_KINDS:
                    self._add_op(graph, graph.op(name))
        for index, group in enumerate(self.groups):
            for member in group.members:
                self._connect(index, member)
        for group in self.groups:
            self._examine(group)

    def _add_op(self, graph: Graph, op: Op) -> None:
        """Add an op to the group of the op that it is fused into, or to a new one."""
        key = (graph.name, op.name)
        host = self._host(graph, op)
        if host is None:
            host = len(self.groups)
            self.groups.append(FusedOps(members=[]))
        self.groups[host].members.append(key)
        self.group_by_op[key] = host

    def _host(self, graph: Graph, op: Op) -> int | None:
        """Return the group whose last op ONNX Runtime joins with `op`."""
        slots = [(Use(graph.name, op.name, slot), tensor) for slot, tensor in enumerate(graph.slots(op.name)) if tensor]
        activations = [(use, tensor) for use, tensor in slots if not self.parameters.is_parameter(tensor)]
        if len(activations) != 1:
            return None
        use, tensor = activations[0]
        host = self.group_by_op.get((tensor.graph, tensor.op))
        if use in self._fused_uses:
            return host
        if host is None or tensor.graph != graph.name or use in self.site_by_use or len(graph.consumers(tensor)) != 1:
            return None
        host_kinds = [graph.op(name).kind for _, name in self.groups[host].members]
        is_product = host_kinds[0] in MATRIX_PRODUCT_KINDS
        is_bias = op.kind in BIAS_ADD_KINDS and len(slots) > 1 and host_kinds == ["matmul"]
        is_clamp = op.kind in CLAMP_KINDS and host_kinds[-1] not in CLAMP_KINDS
        return host if is_product and (is_bias or is_clamp) else None

    def _connect(self, index: int, member: OpKey) -> None:
        graph = self.model.graphs[member[0]]
        for tensor in graph.slots(member[1]):
            if tensor is None or graph.output(tensor).dtype not in FLOAT_TYPES or self.parameters.is_parameter(tensor):
                continue
            producer = self.group_by_op.get((tensor.graph, tensor.op))
            if producer is None or producer == index:
                continue
            if tensor not in self._tensor_index:
                self._tensor_index[tensor] = len(self.tensors)
                self.groups[producer].writes.append(len(self.tensors))
                self.tensors.append(
                    Activation(
                        tensor=tensor,
                        producer=producer,
                        values=count_values(graph, tensor),
                        is_map=len(graph.output(tensor).shape or ()) == 4,  # noqa: PLR2004  # a feature map
                    )
                )
            position = self._tensor_index[tensor]
            if self.tensors[position].readers[-1:] != [index]:
                self.tensors[position].readers.append(index)
                self.groups[index].reads.append(position)

    def _examine(self, group: FusedOps) -> None:
        """Find the kernel of a group, and the quantization that the plan gives it."""
        graph_name, name = group.members[0]
        graph = self.model.graphs[graph_name]
        op = graph.op(name)
        group.has_weight = op.kind in WEIGHTED_KINDS
        group.work = describe_work(graph, op, self.parameters)
        data_slots = [
            slot
            for slot, tensor in enumerate(graph.slots(name))
            if tensor is not None and op.role(slot) in {"input", "weight"} and _is_float(graph, tensor)
        ]
        input_sites = [self.site_by_use.get(Use(graph_name, name, slot)) for slot in data_slots]
        group.fixed = any(site is not None and not _is_plain_byte(site) for site in input_sites)
        if op.domain or op.type not in CONDITIONS or not data_slots or None in input_sites:
            return
        tail_graph, tail = self.model.graphs[group.members[-1][0]], group.members[-1][1]
        uses = [use for uses in tail_graph.consumers_by_port(tail).values() for use in uses]
        is_quantized = [use in self.site_by_use for use in uses]
        group.quantized_output = bool(uses) and all(is_quantized)
        # An integer product may write floats; other integer ops need a pair after them.
        writes_floats = op.kind in MATRIX_PRODUCT_KINDS and not any(is_quantized) and not self._becomes_gemm(group)
        group.has_int8_kernel = group.quantized_output or writes_floats

    def _becomes_gemm(self, group: FusedOps) -> bool:
        """Return True if ONNX Runtime joins a product of matrices and a clamp whose output is float to a float op.

        It dequantizes the weight in each run then, which takes ten times as long as the product.
        """
        graph, last = self.model.graphs[group.members[-1][0]], group.members[-1][1]
        if graph.op(last).kind not in CLAMP_KINDS or len(graph.op(last).outputs[0].shape or (0, 0)) != 2:  # noqa: PLR2004  # a matrix
            return False
        uses = [use for uses in graph.consumers_by_port(last).values() for use in uses]
        return not any(graph.graphs[use.graph].op(use.op).kind == "output" for use in uses)

    @property
    def decidable(self) -> list[int]:
        """Indices of the groups that the plan lets run on integers, and that may become float."""
        return [i for i, group in enumerate(self.groups) if group.has_int8_kernel and not group.fixed]

    def total_work(self, int8_groups: Iterable[int]) -> WorkTotals:
        """Return the work of all ops and conversions if the groups `int8_groups` run on integers."""
        labels = {*int8_groups}
        total: WorkTotals = Counter()
        for index, group in enumerate(self.groups):
            if group.work is not None:
                kind, work = "int8" if index in labels else "float", group.work
                for name, amount in (work.int8_work if index in labels else work.float_work).items():
                    total[f"{work.kernel} {kind}", name] += amount
        for tensor in self.tensors:
            for conversion in self.needed_conversions(tensor, labels):
                total[conversion, "ops"] += 1
                total[conversion, "values"] += tensor.values
        return total

    def needed_conversions(self, tensor: Activation, int8_groups: set[int]) -> list[str]:
        """Return the kernels of the conversions that a tensor needs."""
        if tensor.producer in int8_groups and self.groups[tensor.producer].quantized_output:
            is_needed = any(reader not in int8_groups for reader in tensor.readers)
            return [tensor.conversion(DEQUANTIZE)] if is_needed else []
        is_needed = any(reader in int8_groups for reader in tensor.readers)
        return [tensor.conversion(QUANTIZE)] if is_needed else []


def _is_float(graph: Graph, tensor: TensorRef) -> bool:
    return graph.output(tensor).dtype in FLOAT_TYPES


def _is_plain_byte(site: Site) -> bool:
    """Return True for a site whose integers the int8 kernels read."""
    scheme = site.scheme
    is_plain = scheme.range not in {"dynamic", "learned"} and scheme.block_size is None
    return is_plain and not isinstance(scheme.type, FloatType) and scheme.type.bits == BYTE_BITS


class _PlacementSearch:
    """Search for the groups that run on integers. Times are in nanoseconds."""

    def __init__(self, placement: Placement, table: CostTable) -> None:
        self.placement = placement
        groups, tensors = placement.groups, placement.tensors
        self.decidable = placement.decidable
        self.is_decidable = [False] * len(groups)
        for index in self.decidable:
            self.is_decidable[index] = True
        self.float_cost, self.int8_cost = [0.0] * len(groups), [0.0] * len(groups)
        for index, group in enumerate(groups):
            # An op of which the table knows one form only is not judged.
            if group.work is not None and table.knows(group.work.kernel):
                kernel = group.work.kernel
                self.float_cost[index] = table.nanoseconds(f"{kernel} float", group.work.float_work)
                self.int8_cost[index] = INT8_ADVANTAGE * table.nanoseconds(f"{kernel} int8", group.work.int8_work)
        conversion_work = [{"ops": 1.0, "values": tensor.values} for tensor in tensors]
        self.quantize_cost, self.dequantize_cost = (
            [
                table.nanoseconds(tensor.conversion(name), work)
                for tensor, work in zip(tensors, conversion_work, strict=True)
            ]
            for name in (QUANTIZE, DEQUANTIZE)
        )
        self.is_int8 = [group.fixed for group in groups]
        self.time = 0.0  # total time, relative to the start
        self.int8_readers = [sum(self.is_int8[reader] for reader in tensor.readers) for tensor in tensors]

    def flip(self, index: int) -> None:
        """Change one group between float and int8."""
        group, becomes_int8 = self.placement.groups[index], not self.is_int8[index]
        affected = [*group.reads, *(group.writes if group.quantized_output else ())]
        before = sum(map(self._conversion_time, affected))
        self.is_int8[index] = becomes_int8
        for position in group.reads:
            self.int8_readers[position] += 1 if becomes_int8 else -1
        difference = self.int8_cost[index] - self.float_cost[index]
        self.time += (difference if becomes_int8 else -difference) + sum(map(self._conversion_time, affected)) - before

    def _conversion_time(self, position: int) -> float:
        tensor = self.placement.tensors[position]
        if self.is_int8[tensor.producer] and self.placement.groups[tensor.producer].quantized_output:
            return self.dequantize_cost[position] if self.int8_readers[position] < len(tensor.readers) else 0.0
        return self.quantize_cost[position] if self.int8_readers[position] else 0.0

    def try_flips(self, indices: Sequence[int]) -> bool:
        """Change several groups if that saves time, or if all become int8 at no cost."""
        before, to_int8 = self.time, not any(self.is_int8[index] for index in indices)
        for index in indices:
            self.flip(index)
        tolerance = 1e-9 * max(abs(before), 1.0)
        if self.time < before - tolerance or (to_int8 and self.time <= before + tolerance):
            return bool(indices)
        for index in reversed(indices):
            self.flip(index)
        self.time = before
        return False

    def run(self) -> list[int]:
        """Return the groups that run on integers in the faster of two placements, from all int8 and from all float."""
        outcomes = []
        for start in (self.decidable, ()):
            for index in self.decidable:
                if self.is_int8[index] != (index in start):
                    self.flip(index)
            self._improve()
            outcomes.append((self.time, [index for index in self.decidable if self.is_int8[index]]))
        return min(outcomes, key=lambda outcome: outcome[0])[1]

    def _improve(self) -> None:
        for number in range(MAX_ROUNDS):
            changed = self._try_tree(last_parent=bool(number % 2))
            changed |= self._try_regions()
            for index in self.decidable:
                changed |= self.try_flips([index])
            if not changed:
                break

    def _try_regions(self) -> bool:
        """Try to change each connected region of int8 groups, and of float groups."""
        changed = False
        for label in (True, False):
            for region in self.regions(label):
                changed |= self.try_flips(region)
        return changed

    def regions(self, label: bool) -> list[list[int]]:
        """Return the connected groups that can run on integers, and do (True) or do not (False)."""
        members = [index for index in self.decidable if self.is_int8[index] == label]
        inside = {*members}
        edges = (
            (tensor.producer, reader)
            for tensor in self.placement.tensors
            if tensor.producer in inside
            for reader in tensor.readers
            if reader in inside
        )
        return connected_groups(members, edges)

    def _try_tree(self, *, last_parent: bool) -> bool:
        """Try the best placement of a spanning forest in which each group keeps the edge to one of its producers.

        The conversions of other edges are estimated from the present placement. The exact time decides.
        """
        groups, tensors = self.placement.groups, self.placement.tensors
        best: list[list[float]] = [[self.float_cost[i], self.int8_cost[i]] for i in range(len(groups))]
        for index, group in enumerate(groups):
            if not self.is_decidable[index]:
                best[index][not group.fixed] = float("inf")
        parents: list[int | None] = [None] * len(groups)
        for index, group in enumerate(groups):
            candidates = [position for position in group.reads if tensors[position].producer < index]
            if candidates:
                parents[index] = candidates[-1 if last_parent else 0]
            for position in group.reads:
                if position != parents[index]:
                    self._add_other_edge(best, index, position)
        choices: list[tuple[int, int]] = [(0, 0)] * len(groups)
        for index in reversed(range(len(groups))):
            position = parents[index]
            if position is None:
                continue
            producer = tensors[position].producer
            chosen = []
            for producer_label in (0, 1):
                totals = [best[index][label] + self._edge_time(position, producer_label, label) for label in (0, 1)]
                label = int(totals[1] <= totals[0])
                chosen.append(label)
                best[producer][producer_label] += totals[label]
            choices[index] = (chosen[0], chosen[1])
        labels = [0] * len(groups)
        for index in range(len(groups)):
            position = parents[index]
            if position is None:
                labels[index] = int(best[index][1] <= best[index][0])
            else:
                labels[index] = choices[index][labels[tensors[position].producer]]
        return self.try_flips([index for index in self.decidable if labels[index] != self.is_int8[index]])

    def _add_other_edge(self, best: list[list[float]], index: int, position: int) -> None:
        """Add half of an edge's conversion to the reader, and half to the producer, as if the other one were fixed."""
        producer = self.placement.tensors[position].producer
        for label in (0, 1):
            best[index][label] += self._edge_time(position, int(self.is_int8[producer]), label) / 2
            best[producer][label] += self._edge_time(position, label, int(self.is_int8[index])) / 2

    def _edge_time(self, position: int, producer_label: int, reader_label: int) -> float:
        """Return the share of an edge in its tensor's conversion, which readers of the same kind need only once."""
        tensor = self.placement.tensors[position]
        writes_integers = producer_label and self.placement.groups[tensor.producer].quantized_output
        if bool(writes_integers) == bool(reader_label):
            return 0.0
        int8_readers = self.int8_readers[position]
        if reader_label:
            return self.quantize_cost[position] / max(int8_readers, 1)
        return self.dequantize_cost[position] / max(len(tensor.readers) - int8_readers, 1)


def place_by_cost(model: Model, plan: Plan, table: CostTable) -> Plan:
    """Return the plan without the sites of ops that are estimated to be faster in float.

    If no weighted op would stay on integers, the plan keeps all its sites and gets a warning.
    """
    placement = Placement(model, plan)
    search = _PlacementSearch(placement, table)
    int8_groups = {*search.run()}
    float_groups = [index for index in placement.decidable if index not in int8_groups]
    if not float_groups:
        return plan
    if not any(placement.groups[index].has_weight for index in int8_groups):
        return replace(plan, warnings=(*plan.warnings, ALL_FLOAT_WARNING))
    for index in placement.decidable:
        if search.is_int8[index] != (index in int8_groups):
            search.flip(index)
    return without_float_ops(placement, plan, int8_groups, _explain_regions(search))


ALL_FLOAT_WARNING = (
    "no part of the model is estimated to be faster on integers than in float, so the plan follows the rules alone;"
    " measure the result before you use it"
)


def _explain_regions(search: _PlacementSearch) -> dict[int, str]:
    """Return the reason why groups stay float, with the estimated times of their region."""
    reasons = {}
    for region in search.regions(label=False):
        before, float_time = search.time, sum(search.float_cost[index] for index in region)
        for index in region:
            search.flip(index)
        int8_time = float_time + search.time - before
        for index in reversed(region):
            search.flip(index)
        reason = (
            f"int8 does not pay: an estimated {int8_time / 1000:.3g} us on integers with the conversions, and"
            f" {float_time / 1000:.3g} us in float"
        )
        reasons.update(dict.fromkeys(region, reason))
    return reasons


def without_float_ops(placement: Placement, plan: Plan, int8_groups: set[int], reasons: Mapping[int, str]) -> Plan:
    """Return the plan without the uses that no int8 op needs."""
    sites, skips = [], [_without_fusion(placement, skip, int8_groups) for skip in plan.skips]

    def group_of(op: OpKey) -> int:
        return placement.group_by_op.get(op, -1)

    def is_needed(site: Site, use: Use) -> bool:
        reader, producer = group_of((use.graph, use.op)), group_of((site.tensor.graph, site.tensor.op))
        if reader in int8_groups or (reader >= 0 and placement.groups[reader].fixed):
            return True
        # An int8 op writes integers only if all readers of its output read them.
        return not site.parameter and producer in int8_groups and placement.groups[producer].quantized_output

    for site in plan.sites:
        kept = tuple(use for use in site.uses if is_needed(site, use))
        producer = group_of((site.tensor.graph, site.tensor.op))
        if kept:
            tie = site.tie if producer in int8_groups else ()
            sites.append(replace(site, uses=kept, tie=tie))
        dropped: defaultdict[str, list[Use]] = defaultdict(list)
        for use in site.uses:
            if use not in kept:
                reader = group_of((use.graph, use.op))
                reason = reasons.get(reader) or reasons.get(producer) or NO_INT8_READER
                dropped[reason].append(use)
        skips += [
            Skip(tensor=site.tensor, uses=tuple(uses), rule=site.rule, reason=reason, code=SkipCode.COST)
            for reason, uses in dropped.items()
        ]
    return replace(plan, sites=tuple(sites), skips=tuple(skips))


NO_INT8_READER = "int8 does not pay: the ops that read it run in float"


def _without_fusion(placement: Placement, skip: Skip, int8_groups: set[int]) -> Skip:
    """Return a skip that adds no pair for an activation that is fused into a float op."""
    producer = placement.group_by_op.get((skip.tensor.graph, skip.tensor.op), -1)
    is_float = skip.fused and producer in {*placement.decidable} - int8_groups
    return replace(skip, fused=False) if is_float else skip


def converted_values(model: Model, verdicts: Sequence[Verdict]) -> dict[OpKey, int]:
    """Return the values that are converted in each run for each float op of a quantized model, most first.

    These are the values of dequantized inputs, weights included, and of quantized outputs.
    """
    counts: Counter[OpKey] = Counter()
    for verdict in verdicts:
        if verdict.status != "float":
            continue
        graph = model.graphs[verdict.graph]
        read = {tensor for tensor in graph.slots(verdict.op) if tensor is not None}
        tensors = {tensor for tensor in read if model.op(tensor).kind == "dequantize"}
        for port, uses in graph.consumers_by_port(verdict.op).items():
            if any(model.graphs[use.graph].op(use.op).kind == "quantize" for use in uses):
                tensors.add(TensorRef(graph.name, verdict.op, port))
        counts[verdict.graph, verdict.op] = sum(model.output(tensor).elements_per_sample or 0 for tensor in tensors)
    return {op: count for op, count in counts.most_common() if count}
