"""Decide which ops of a plan run in int8 on ONNX Runtime's CPU kernels, and which are estimated to be faster in float.

ONNX Runtime runs an op on integers if all its data inputs are dequantized and its output is quantized. Otherwise the op
runs in float, after the conversion of its inputs. The decision minimizes the estimated time of all ops and conversions.
It takes time proportional to the number of ops and edges, and measures nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from graphquant.backends.onnxruntime_conditions import CONDITIONS
from graphquant.backends.onnxruntime_costs import (
    FIRST_CONVOLUTION,
    IMAGE_RANK,
    CostTable,
    KernelWork,
    Work,
    count_values,
    describe_work,
    find_gate,
)
from graphquant.ir import (
    BIAS_ADD_KINDS,
    CONVOLUTION_KINDS,
    FLOAT_TYPES,
    MATRIX_PRODUCT_KINDS,
    QUANTIZATION_KINDS,
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

if TYPE_CHECKING:
    from graphquant.backends.findings import Verdict

INT8_WORTHS, FINE_WORTHS = (1.5, 0.7, 0.4, 0.2, 0.0), (0.4, 0.2)
"""Shares of a weighted op's float time that int8 may cost in addition, in the order in which they are tried. The fine
ones serve to be faster than float. Int8 saves energy and memory as well (see decision 0074)."""

CLEAR_GAIN = 0.2
"""Share of an op's float time that int8 has to save if no placement reaches the last of `TIME_RATIOS`. Estimates of
smaller gains are not reliable, so a placement that is full of them may be slower than float."""

TIME_RATIOS = (0.75, 0.95)
"""Estimated times of the model relative to float, the first of which decides that any worth of int8 reaches. The
placement that keeps most in int8 is used.

Their margins below float are the errors of the estimate: 6% in half of the measured models, 22% in nine of ten.
"""

COST_RULE = "costs"  # rule of the skips of ops that are faster in float
MAX_NEIGHBORS = 8  # largest number of ops that are changed together with their reader or producer
MAX_ROUNDS = 4  # rounds of the search for a better placement; most models need two
BYTE_BITS = 8
UNEXAMINED_TYPES = frozenset({"Where", "ArgMax"})
CLAMP_KINDS = frozenset({"relu", "relu6", "clip"})  # kinds that a product limits its output by

QUANTIZE, DEQUANTIZE = "quantize", "dequantize"
PLANAR_POOL = "max_pool.planar"
"""Kernel of an int8 MaxPool whose input is not the output of an int8 op. It is many times slower than the one in the
layout of int8 convolutions."""


@dataclass(slots=True, kw_only=True)
class FusedOps:
    """Ops that run as one: an op, and the bias or activation that ONNX Runtime fuses into it."""

    members: list[OpKey]
    work: KernelWork | None = None
    has_int8_kernel: bool = False  # True if the plan lets it run on integers
    quantized_output: bool = False  # True if its int8 kernel writes integers; some products write floats
    fixed: bool = False  # True if the plan decides alone: it has no shape, or is not quantized to 8 bits
    has_weight: bool = False
    is_max_pool: bool = False
    reads_blocks: bool = False  # True if its float kernel reads the blocked layout of convolutions
    writes_blocks: bool = False  # True if its float kernel writes that layout
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

    @property
    def work(self) -> Work:
        """The work of one conversion."""
        return {"ops": 1.0, "values": self.values}

    def conversion(self, name: str, *, is_blocked: bool) -> str:
        """Return the kernel of a conversion, to or from the blocked layout of float convolutions if `is_blocked`."""
        if not self.is_map:
            return name
        return f"{name}.blocked" if is_blocked else f"{name}.map"


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
        gate = find_gate(graph, op)
        if gate:
            return self.group_by_op.get((graph.name, gate))
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
                        is_map=len(graph.output(tensor).shape or ()) == IMAGE_RANK,
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
        group.has_weight, group.is_max_pool = op.kind in WEIGHTED_KINDS, op.kind == "max_pool"
        last = graph.op(group.members[-1][1])
        group.work = describe_work(graph, last if find_gate(graph, last) else op, self.parameters)
        group.reads_blocks = op.kind in CONVOLUTION_KINDS and (
            group.work is None or group.work.kernel != FIRST_CONVOLUTION
        )
        group.writes_blocks = op.kind in CONVOLUTION_KINDS
        data_uses = [
            Use(graph_name, name, slot)
            for slot, tensor in enumerate(graph.slots(name))
            if tensor is not None
            and op.role(slot) in {"input", "weight"}
            and graph.output(tensor).dtype in FLOAT_TYPES
            and self.model.op(tensor).kind != "dequantize"
        ]
        input_sites = [self.site_by_use.get(use) for use in data_uses]
        group.fixed = any(site is not None and not _is_plain_byte(site) for site in input_sites)
        # These have int8 kernels under conditions of their own, which are not examined here.
        group.fixed |= op.type in UNEXAMINED_TYPES
        interpolates = op.kind == "resize" and op.attrs.get("mode", "nearest") not in {"nearest", b"nearest"}
        has_conditions = op.type in CONDITIONS and not op.domain and not interpolates
        if group.fixed or not has_conditions or not data_uses or None in input_sites:
            return
        tail_graph, tail = self.model.graphs[group.members[-1][0]], group.members[-1][1]
        uses = [use for uses in tail_graph.consumers_by_port(tail).values() for use in uses]
        is_quantized = [
            use in self.site_by_use or self.model.graphs[use.graph].op(use.op).kind == "quantize" for use in uses
        ]
        group.quantized_output = bool(uses) and all(is_quantized)
        # An integer product may write floats; other integer ops need a pair after them.
        writes_floats = op.kind in MATRIX_PRODUCT_KINDS and not any(is_quantized) and not self._becomes_gemm(group)
        group.has_int8_kernel = group.quantized_output or writes_floats
        # Without a shape there is no estimate, so the plan decides.
        group.fixed |= group.has_int8_kernel and group.has_weight and group.work is None

    def _becomes_gemm(self, group: FusedOps) -> bool:
        """Return True if ONNX Runtime joins a product of matrices and a clamp whose output is float to a float op.

        It dequantizes the weight in each run then, which takes ten times as long as the product.
        """
        graph, last = self.model.graphs[group.members[-1][0]], group.members[-1][1]
        shapes = [output.shape for output in graph.op(last).outputs[:1]]
        if graph.op(last).kind not in CLAMP_KINDS or any(len(shape or (0, 0)) != 2 for shape in shapes):  # noqa: PLR2004  # a matrix
            return False
        uses = [use for uses in graph.consumers_by_port(last).values() for use in uses]
        return not any(graph.graphs[use.graph].op(use.op).kind == "output" for use in uses)

    @property
    def decidable(self) -> list[int]:
        """Indices of the groups that the plan lets run on integers, and that may become float."""
        return [i for i, group in enumerate(self.groups) if group.has_int8_kernel and not group.fixed]

    def producers(self, group: FusedOps) -> list[int]:
        """Return the groups whose outputs `group` reads."""
        return [self.tensors[position].producer for position in group.reads]


def _is_plain_byte(site: Site) -> bool:
    """Return True for a site whose integers the int8 kernels read."""
    scheme = site.scheme
    is_plain = scheme.range not in {"dynamic", "learned"} and scheme.block_size is None and not site.family.variant_of
    return is_plain and not isinstance(scheme.type, FloatType) and scheme.type.bits == BYTE_BITS


class PlacementSearch:
    """Search for the groups that run on integers.

    Times are in nanoseconds, those of weighted ops in int8 less a share of their float time.
    """

    def __init__(self, placement: Placement, table: CostTable) -> None:
        """Start with all groups in float, and no share."""
        self.placement = placement
        groups, tensors = placement.groups, placement.tensors
        self.decidable = placement.decidable
        self.is_decidable = [group.has_int8_kernel and not group.fixed for group in groups]
        self.float_cost, self._int8_times = [0.0] * len(groups), [0.0] * len(groups)
        self._is_known = [group.work is not None and table.knows(group.work.kernel) for group in groups]
        for index, group in enumerate(groups):
            if group.work is None:
                continue
            kernel = group.work.kernel
            self.float_cost[index] = self._int8_times[index] = table.nanoseconds(
                f"{kernel} float", group.work.float_work
            )
            if self._is_known[index]:
                self._int8_times[index] = table.nanoseconds(f"{kernel} int8", group.work.int8_work)
        self.quantize_cost = [
            table.nanoseconds(
                tensor.conversion(QUANTIZE, is_blocked=groups[tensor.producer].writes_blocks), tensor.work
            )
            for tensor in tensors
        ]
        # For a reader with the usual layout, and for one with the blocked layout.
        self.dequantize_cost = [
            [
                table.nanoseconds(tensor.conversion(DEQUANTIZE, is_blocked=is_blocked), tensor.work)
                for is_blocked in (False, True)
            ]
            for tensor in tensors
        ]
        # Additional time of a group in float that reads the output of an int8 op, and the other way round.
        self.split_cost, self.planar_cost = [0.0] * len(groups), [0.0] * len(groups)
        for index, group in enumerate(groups):
            if group.work is not None and group.work.split_kernels:
                kernels = group.work.split_kernels
                parts = sum(table.nanoseconds(f"{kernel} float", group.work.float_work) for kernel in kernels)
                self.split_cost[index] = max(parts - self.float_cost[index], 0.0)
            elif group.is_max_pool and group.work is not None:
                planar = table.nanoseconds(f"{PLANAR_POOL} int8", group.work.int8_work)
                self.planar_cost[index] = max(planar - self._int8_times[index], 0.0)
        # What `flip` reads often: the tensors whose conversions depend on each group, the groups that write each tensor
        # as integers in int8, and the time of a DequantizeLinear for each tensor it reads.
        self._affected = [[*group.reads, *(group.writes if group.quantized_output else ())] for group in groups]
        self._integer_producers = [
            tensor.producer if groups[tensor.producer].quantized_output else None for tensor in tensors
        ]
        self._reads = [
            [(position, self._dequantize_time(position, index)) for position in group.reads]
            for index, group in enumerate(groups)
        ]
        # Then the best placement of the forest is the best one of all.
        self._is_forest = all(len(group.reads) <= 1 for group in groups) and all(
            len(tensor.readers) <= 1 for tensor in tensors
        )
        self._run_cost = table.nanoseconds("run", {"ops": 1.0})
        self.start(0.0)

    def start(self, int8_worth: float) -> None:
        """Let all groups run in float that are not fixed. A larger worth keeps more multiply-adds in int8.

        It is the share of the float time of a weighted op that int8 may cost in addition. An op of which the table
        knows one form only is not judged.
        """
        groups, tensors = self.placement.groups, self.placement.tensors
        self.int8_cost = [
            time - int8_worth * float_cost if is_known and group.has_weight else time
            for group, time, float_cost, is_known in zip(
                groups, self._int8_times, self.float_cost, self._is_known, strict=True
            )
        ]
        self.is_int8 = [group.fixed for group in groups]
        self._settled: list[bool] = []  # a placement in which no change of a region or of neighbors saves time
        self.time = self._run_cost + sum(self.float_cost)
        self.int8_readers = [sum(self.is_int8[reader] for reader in tensor.readers) for tensor in tensors]
        self.dequantize_times = [
            sum(self._dequantize_time(position, reader) for reader in tensor.readers if not self.is_int8[reader])
            for position, tensor in enumerate(tensors)
        ]
        self.planar_times = [
            sum(self.planar_cost[reader] for reader in tensor.readers if self.is_int8[reader]) for tensor in tensors
        ]

    def flip(self, index: int) -> None:
        """Change one group between float and int8."""
        affected = self._affected[index]
        before = self._conversion_time(affected)
        self._toggle(index)
        difference = self.int8_cost[index] - self.float_cost[index]
        difference = difference if self.is_int8[index] else -difference
        self.time += difference + self._conversion_time(affected) - before

    def _toggle(self, index: int) -> None:
        """Change one group, but not the total time."""
        self.is_int8[index] = not self.is_int8[index]
        sign = 1 if self.is_int8[index] else -1
        for position, dequantize_time in self._reads[index]:
            self.int8_readers[position] += sign
            self.dequantize_times[position] -= sign * dequantize_time
            self.planar_times[position] += sign * self.planar_cost[index]

    def _conversion_time(self, positions: Iterable[int]) -> float:
        """Return the time of all conversions of tensors."""
        total, is_int8 = 0.0, self.is_int8
        for position in positions:
            producer = self._integer_producers[position]
            if producer is not None and is_int8[producer]:
                total += self.dequantize_times[position]
            elif self.int8_readers[position]:
                total += self.quantize_cost[position] + self.planar_times[position]
        return total

    def _dequantize_time(self, position: int, reader: int) -> float:
        """Return the time that an int8 tensor adds to a float reader."""
        return self.dequantize_cost[position][self.placement.groups[reader].reads_blocks] + self.split_cost[reader]

    def try_flips(self, indices: Sequence[int]) -> bool:
        """Change several groups if that saves time, or if all become int8 at no cost."""
        if not indices:
            return False
        before, to_int8 = self.time, not any(self.is_int8[index] for index in indices)
        for index in indices:
            self.flip(index)
        tolerance = 1e-9 * max(abs(before), 1.0)
        if self.time < before - tolerance or (to_int8 and self.time <= before + tolerance):
            return True
        for index in reversed(indices):
            self._toggle(index)
        self.time = before
        return False

    def run(self) -> list[int]:
        """Return the groups that run on integers in the faster of two placements, from all int8 and from all float."""
        outcomes = []
        for start in (self.decidable, ()):
            self.set_int8(start)
            self._improve()
            outcomes.append((self.time, [index for index in self.decidable if self.is_int8[index]]))
        self.set_int8(min(outcomes, key=lambda outcome: outcome[0])[1])
        # Without multiply-adds, int8 costs accuracy, and estimates of so small gains are not reliable.
        regions = [region for region in self.regions(label=True) if any(map(self._serves_weight, region))]
        return sorted(index for region in regions for index in region)

    def _serves_weight(self, index: int) -> bool:
        """Return True for an op with a weight, and for a neighbor of an op that the plan alone decides."""
        group = self.placement.groups[index]
        readers = (reader for position in group.writes for reader in self.placement.tensors[position].readers)
        neighbors = (*self.placement.producers(group), *readers)
        return group.has_weight or any(self.placement.groups[neighbor].fixed for neighbor in neighbors)

    def set_int8(self, indices: Iterable[int]) -> None:
        """Let exactly the groups `indices` run on integers."""
        chosen = {*indices}
        for index in self.decidable:
            if self.is_int8[index] != (index in chosen):
                self.flip(index)

    def _improve(self) -> None:
        for number in range(MAX_ROUNDS):
            changed = self._try_tree(last_parent=bool(number % 2))
            if not self._is_forest and self.is_int8 != self._settled:
                start = [*self.is_int8]
                for label in (True, False):
                    for region in self.regions(label):
                        self.try_flips(region)
                for index in self.decidable:
                    self.try_flips([index])
                self._try_neighbors()
                self._settled = start if self.is_int8 == start else []
                changed |= self.is_int8 != start
            if not changed:
                break

    def _try_neighbors(self) -> None:
        """Try to change each op with its producers and with its readers of the same kind."""
        for index in self.decidable:
            group, label = self.placement.groups[index], self.is_int8[index]
            readers = [reader for position in group.writes for reader in self.placement.tensors[position].readers]
            for others in (self.placement.producers(group), readers):
                same = [i for i in dict.fromkeys(others) if self.is_decidable[i] and self.is_int8[i] == label]
                if same and len(same) <= MAX_NEIGHBORS and self.is_int8[index] == label:
                    self.try_flips([index, *same])

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
        tensors = self.placement.tensors
        parents = self._choose_parents(last_parent=last_parent)
        times = self._own_times(parents)
        choices = self._choose_labels(parents, times)
        labels: list[int] = []
        for index, position in enumerate(parents):
            if position is None:
                labels.append(int(times[index][1] <= times[index][0]))
            else:
                labels.append(choices[index][labels[tensors[position].producer]])
        return self.try_flips([index for index in self.decidable if labels[index] != self.is_int8[index]])

    def _choose_parents(self, *, last_parent: bool) -> list[int | None]:
        """Return for each group the tensor whose producer comes before it in the forest, or None for a root."""
        tensors, parents = self.placement.tensors, list[int | None]()
        for index, group in enumerate(self.placement.groups):
            candidates = [position for position in group.reads if tensors[position].producer < index]
            parents.append(candidates[-1 if last_parent else 0] if candidates else None)
        return parents

    def _own_times(self, parents: Sequence[int | None]) -> list[list[float]]:
        """Return the time of each group in float and in int8, with its share in conversions outside of the forest."""
        groups = self.placement.groups
        times = [[self.float_cost[index], self.int8_cost[index]] for index in range(len(groups))]
        for index, group in enumerate(groups):
            if not self.is_decidable[index]:
                times[index][not group.fixed] = float("inf")
            # Half of another edge's conversion counts for each end, as if the other end were fixed.
            for position in (position for position in group.reads if position != parents[index]):
                producer = self.placement.tensors[position].producer
                for label in (0, 1):
                    times[index][label] += self._edge_time(position, index, int(self.is_int8[producer]), label) / 2
                    times[producer][label] += self._edge_time(position, index, label, int(self.is_int8[index])) / 2
        return times

    def _choose_labels(self, parents: Sequence[int | None], times: list[list[float]]) -> dict[int, tuple[int, int]]:
        """Return the best label of each group for both labels of its parent, and add its time to that of the parent."""
        choices = {}
        for index in reversed(range(len(parents))):
            if (position := parents[index]) is None:
                continue
            chosen = []
            for parent_label in (0, 1):
                totals = [
                    times[index][label] + self._edge_time(position, index, parent_label, label) for label in (0, 1)
                ]
                chosen.append(int(totals[1] <= totals[0]))
                times[self.placement.tensors[position].producer][parent_label] += totals[chosen[-1]]
            choices[index] = (chosen[0], chosen[1])
        return choices

    def _edge_time(self, position: int, reader: int, producer_label: int, reader_label: int) -> float:
        """Return the share of an edge in the conversions of its tensor. All int8 readers need it quantized once."""
        tensor = self.placement.tensors[position]
        writes_integers = producer_label and self.placement.groups[tensor.producer].quantized_output
        if bool(writes_integers) == bool(reader_label):
            return 0.0
        if reader_label:
            return self.quantize_cost[position] / max(self.int8_readers[position], 1) + self.planar_cost[reader]
        return self._dequantize_time(position, reader)


class _Outcome(NamedTuple):
    """A placement, and the share of float time that int8 was allowed to cost."""

    worth: float
    ratio: float  # estimated time relative to float
    int8_groups: list[int]


def place_by_cost(model: Model, plan: Plan, table: CostTable) -> Plan:
    """Return the plan without the sites of ops that are estimated to be faster in float.

    If no weighted op would stay on integers, the plan keeps all its sites and gets a warning.
    """
    placement = Placement(model, plan)
    search = PlacementSearch(placement, table)
    float_time = search.time
    outcomes: list[_Outcome] = []
    for worth in (*INT8_WORTHS, -CLEAR_GAIN):
        search.start(worth)
        int8_groups = search.run()
        members = {*int8_groups}
        if not any(group.has_weight and (i in members or group.fixed) for i, group in enumerate(placement.groups)):
            break
        search.start(0.0)
        search.set_int8(int8_groups)
        outcomes.append(_Outcome(worth, search.time / float_time, int8_groups))
        if outcomes[-1].ratio <= TIME_RATIOS[0]:
            break
    if any(op.kind in QUANTIZATION_KINDS for _, op in model.reachable_ops()):
        # What an earlier run left float stays float, unless it is now estimated to be faster on integers.
        outcomes = [each for each in outcomes if each.ratio <= TIME_RATIOS[-1]] or [_Outcome(0.0, 1.0, [])]
    if not outcomes:
        placed = without_float_ops(placement, plan, {*placement.decidable}, {})
        warnings = (*plan.warnings, *([ALL_FLOAT_WARNING] if plan.sites else []))
        return replace(placed if placed.sites else plan, warnings=warnings)
    fast_enough = (each for limit in TIME_RATIOS for each in outcomes if each.worth >= 0 and each.ratio <= limit)
    clear = [each for each in outcomes if each.worth < 0]
    coarse = [each for each in outcomes if each.worth >= 0 and each.worth not in FINE_WORTHS]
    slow = clear[0] if clear else min(coarse or outcomes, key=lambda each: each.ratio)
    _, ratio, int8_groups = next(fast_enough, slow)  # it may be slower than float
    if round(ratio, 2) > 1:
        plan = replace(plan, warnings=(*plan.warnings, f"the model is estimated to take {ratio:.2f} of float's time"))
    search.start(0.0)
    search.set_int8(int8_groups)
    return without_float_ops(placement, plan, {*int8_groups}, _explain_regions(search))


ALL_FLOAT_WARNING = (
    "no part of the model is estimated to be faster on integers than in float, so the plan follows the rules alone."
    " Measure the result before you use it"
)


def _explain_regions(search: PlacementSearch) -> dict[int, str]:
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
    sites = []
    float_groups = {*placement.decidable} - int8_groups
    skips: list[Skip] = []

    def group_of(op: OpKey) -> int:
        return placement.group_by_op.get(op, -1)

    def is_needed(site: Site, use: Use) -> bool:
        reader, producer = group_of((use.graph, use.op)), group_of((site.tensor.graph, site.tensor.op))
        if reader in int8_groups or (reader >= 0 and placement.groups[reader].fixed):
            return True
        # An int8 op writes integers only if all readers of its output read them.
        return not site.parameter and producer in int8_groups and placement.groups[producer].quantized_output

    def fuses_into_float(skip: Skip) -> bool:
        return skip.fused and group_of((skip.tensor.graph, skip.tensor.op)) in float_groups

    for site in plan.sites:
        needed = {use: is_needed(site, use) for use in site.uses}
        kept = tuple(use for use in site.uses if needed[use])
        producer = group_of((site.tensor.graph, site.tensor.op))
        if kept:
            tie = site.tie if producer in int8_groups else ()
            sites.append(site if (kept, tie) == (site.uses, site.tie) else replace(site, uses=kept, tie=tie))
        dropped: defaultdict[str, list[Use]] = defaultdict(list)
        for use in site.uses:
            if not needed[use]:
                reader = group_of((use.graph, use.op))
                reason = reasons.get(reader) or reasons.get(producer) or NO_INT8_READER
                dropped[reason].append(use)
        skips += [
            Skip(tensor=site.tensor, uses=tuple(uses), rule=COST_RULE, reason=reason, code=SkipCode.COST)
            for reason, uses in dropped.items()
        ]
    fused_skips = (replace(skip, fused=False) if fuses_into_float(skip) else skip for skip in plan.skips)
    return replace(plan, sites=tuple(sites), skips=(*fused_skips, *skips)) if skips else plan


NO_INT8_READER = "int8 does not pay: the ops that read it run in float"


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
