"""Plan and apply quantization: preparation, the plan, the scale solver, rewriting, stripping and provenance."""

from graphquant.quantize.limits import (
    DPU_ADD_READ_LIMITS,
    DPU_ADD_WRITE_LIMITS,
    DPU_CUT_LIMITS,
    DPU_MAX_BIAS_CUT,
    DPU_MUL_WRITE_LIMITS,
    power_of_two_position,
)
from graphquant.quantize.plan import Plan, Site, Skip, SkipCode, check_plan, plan_from_json, plan_to_json, read_plan
from graphquant.quantize.planner import TIED_INPUT_NOT_QUANTIZED, SiteSelection, make_plan, required_opset
from graphquant.quantize.preparation_undo import Step
from graphquant.quantize.prepare import (
    find_skipped_steps,
    format_step_counts,
    look_through_dropped_ops,
    parse_step_names,
    prepare,
)
from graphquant.quantize.range_files import export_ranges, ranges_of_model, read_range_file
from graphquant.quantize.solver import FLOAT8_NOT_RUNNABLE, explain_scale, solve_scales
from graphquant.quantize.solver_state import Conflict, ScaleChange, Solution
from graphquant.quantize.source_record import (
    METADATA_PREFIX,
    OPS_KEY,
    RECORD_KEY,
    make_record,
    node_notes,
    op_provenance_json,
    restore_source,
)
from graphquant.quantize.tflite_ranges import (
    RangeTransfer,
    iterate_equivalent_tensors,
    match_tensor_names,
    may_have_same_size,
    read_name_map,
    transfer_ranges,
)
from graphquant.quantize.ties import MIN_SHARED_STEPS, clip_limits, saturates_like_clip
