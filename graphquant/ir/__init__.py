"""The intermediate representation: an index over the source model, as networkx graphs of ops."""

from graphquant.ir.function_clones import FunctionClones
from graphquant.ir.graph import CONTROL_EDGE, Graph, Model, are_shapes_compatible, check_invariants, paused_gc
from graphquant.ir.kinds import (
    AFFINE_KINDS,
    BIAS_ADD_KINDS,
    BOUNDARY_KINDS,
    BOUNDED_KINDS,
    CLAMPING_KINDS,
    COMMUTATIVE_KINDS,
    CONCATENATING_KINDS,
    CONVOLUTION_KINDS,
    DATA_MOVEMENT_KINDS,
    FORWARDING_KINDS,
    FUSED_PREFIX,
    LOOP_KINDS,
    MAC_KINDS,
    MATRIX_PRODUCT_KINDS,
    NON_COMPUTE_KINDS,
    QUANTIZATION_KINDS,
    RECURRENT_KINDS,
    RELU6_BOUNDS,
    RESHAPING_KINDS,
    STORED_KINDS,
    TRANSPARENT_KINDS,
    VALUE_MOVING_KINDS,
    WEIGHTED_KINDS,
)
from graphquant.ir.macs import (
    channel_axis,
    count_macs,
    input_channels,
    kernel_size,
    matrix_rows,
    merged_channel_shape,
    output_channels,
    reduction_axis,
    unsized_tensors,
)
from graphquant.ir.parameters import Parameters, find_states, require_finite_weight, weight_ends
from graphquant.ir.traversal import connected_groups, follow, follow_to_end, reachable, unique_name
from graphquant.ir.types import (
    FLOAT_TYPES,
    NO_ATTRS,
    Call,
    DataType,
    Op,
    OpInfo,
    OpKey,
    Output,
    Shape,
    StoredQuantization,
    TensorRef,
    Use,
    fully_known_shape,
    qualified_op_name,
)
