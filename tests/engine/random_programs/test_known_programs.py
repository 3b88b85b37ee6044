"""Programs that once differed from eager, reduced as far as possible."""

from __future__ import annotations

import pytest

from .programs import Action, ChunkSpec, Program, Step
from .verdicts import compare

ONCE = Step()


def _of(*layers: str, **fields: object) -> Program:
    return Program(chunks=(ChunkSpec(layers),), **fields)  # type: ignore[arg-type]


def _inside(name: str, spec: ChunkSpec, at: int = 1) -> Program:
    step = Step(count=2, order="wide", inside=(Action(at, name),))
    return Program(chunks=(spec,), num_slots=(2,), steps=(ONCE, ONCE, step))


def _before(name: str) -> Program:
    layers = ("linear", "dropout", "layer_norm")
    return _of(*layers, steps=(ONCE, ONCE, Step(before=(name,)), ONCE))


def _elsewhere(name: str) -> Program:
    return _of("linear", "elsewhere", steps=(ONCE, ONCE, Step(before=(name,)), ONCE))


SEVERAL = ChunkSpec(form="tuple", extras=("head!", "metric!"))

PROGRAMS = {
    "an_output_without_gradient": Program(
        chunks=(ChunkSpec(form="tuple", extras=("head",)),), optimizer="adamw"
    ),
    "gradients_layout_is_that_of_eager": _of("batch_norm_eval"),
    "running_statistics_after_a_session": _of("batch_norm"),
    "masks_of_a_recomputation": _of("checkpoint:dropout"),
    "masks_of_a_reentrant_recomputation": _of("reentrant:dropout"),
    "lstm": _of("lstm"),
    "a_constant_of_the_host": _of("host_constant"),
    "shadow_and_running_statistics": _of("batch_norm", verify="shadow"),
    "shadow_and_casts_of_eager_work_around_a_chunk": Program(
        chunks=(ChunkSpec(("rare",)), ChunkSpec(("linear",), form="tuple")),
        steps=(ONCE, ONCE),
        num_slots=(1, 1),
        engines="each",
        verify="shadow",
        on_failure="eager",
        links="joined",
        loss="tied",
        autocast="outside",
    ),
    "shadow_and_an_expanded_gradient": Program(
        chunks=(ChunkSpec(("group_norm", "batch_norm_eval"), form="list", extras=("norm!",)),),
        steps=(ONCE, Step(count=1, order="deep", seed=53)),
        verify="shadow",
        on_failure="raise",
        num_warmup_passes=0,
        loss="sum",
    ),
    "a_refused_capture_of_a_parameter_that_was_replaced": Program(
        chunks=(ChunkSpec(("listed",)),),
        steps=(
            Step(1, before=("assign_state_dict",), zero="none"),
            Step(1, seed=77, zero="in place", updates=True),
            Step(1, seed=48, zero="in place", updates=True),
        ),
        on_failure="eager",
        num_warmup_passes=1,
    ),
    "a_parameter_that_is_returned": Program(
        chunks=(
            ChunkSpec(("linear",), form="list", extras=("parameter!",)),
            ChunkSpec(("glu", "linear")),
        ),
        steps=(Step(2, order="random", seed=81), ONCE),
        num_slots=(2, 1),
        tied=True,
        links="joined",
        loss="tied",
    ),
    "a_returned_parameter_under_autocast": Program(
        chunks=(ChunkSpec(("without_autocast",), form="dict", extras=("parameter!",)),),
        autocast="step",
    ),
    "gradients_that_require_gradients": _of(
        "linear",
        steps=(
            ONCE,
            Step(kind="eager", inside=(Action(1, "create_graph", 1),)),
            Step(zero="never"),
        ),
    ),
    "a_returned_parameter_that_is_kept_and_frozen": Program(
        chunks=(
            ChunkSpec(("linear",)),
            ChunkSpec(("linear",), form="tuple", extras=("parameter!",)),
        ),
        steps=(
            Step(inside=(Action(18, "keep_view", 1),)),
            Step(kind="eager", after=("freeze",)),
        ),
        num_slots=(4, 4),
        tied=True,
    ),
    "chunks_that_share_a_cast": Program(
        chunks=(ChunkSpec(("linear",)), ChunkSpec(("linear",))),
        num_slots=(2, 1),
        steps=(ONCE, ONCE),
        tied=True,
        links="joined",
        autocast="step",
    ),
    "a_sum_of_input_gradients_and_another_reader": Program(
        chunks=(
            ChunkSpec(("linear",), form="tuple", extras=("twice!",)),
            ChunkSpec(("linear",), form="dict", extras=("identity!",)),
        ),
        num_slots=(1, 1),
        steps=(ONCE, ONCE),
        links="joined",
    ),
    "outputs_that_are_kept": _inside("keep_output", SEVERAL),
    "views_that_are_kept": _inside("keep_view", SEVERAL),
    "losses_that_are_kept": _of("linear", loss="inside", steps=(ONCE, Step(4), ONCE)),
    "gradients_that_are_kept": _before("keep_grads"),
    "gradients_that_are_flat": _before("flat_grads"),
    "gradients_that_are_replaced": _inside("replace_grads", SEVERAL, at=3),
    "gradients_that_are_dropped": _inside("zero_to_none", SEVERAL, at=3),
    "an_output_that_is_changed": _inside("change_output", SEVERAL),
    "an_output_that_is_changed_below_one_that_the_loss_skips": Program(
        chunks=(ChunkSpec(("linear",), form="dict", extras=("head",)),),
        steps=(Step(inside=(Action(1, "change_output"),)),),
    ),
    "an_input_that_is_returned_and_changed": Program(
        chunks=(ChunkSpec(("linear",), form="named", extras=("identity!",)),),
        steps=(ONCE, Step(inside=(Action(1, "write_input", 3),))),
    ),
    "an_output_that_the_loss_skips_once": _inside("skip_extras", SEVERAL),
    "autocast_in_the_backward": _inside("autocast_backward", SEVERAL),
    "other_strides": _inside("other_strides", SEVERAL),
    "a_frozen_parameter": _before("freeze"),
    "a_frozen_parameter_captured_again": _before("freeze+release"),
    "a_replaced_layer": _before("replace_layer"),
    "a_replaced_layer_captured_again": _before("replace_layer+release"),
    "a_replaced_parameter_captured_again": _before("replace_parameter+release"),
    "transposed_data": _before("main_data_transposed"),
    "a_hook_on_a_parameter": _before("add_hook"),
    "gradients_of_inputs_alone": _of("linear", steps=(ONCE, Step(backward="inputs"))),
    "gradients_that_are_returned": _of("linear", steps=(ONCE, Step(backward="grad"))),
    "one_backward_of_two_losses": _of(
        "linear", steps=(ONCE, Step(6, order="unordered", backward="sum")), num_slots=(2,)
    ),
    "state_in_an_attribute": _of("state"),
    "a_parameter_that_the_forward_updates": _of("decay", num_warmup_passes=1),
    "a_cast_that_autocast_shares_and_a_parameter_that_the_forward_updates": _of(
        "decay", autocast="step", steps=(ONCE, Step(2))
    ),
    "attention_that_runs_without_gradients": _of("eval:reentrant:attention"),
    "an_encoder_that_runs_without_gradients": _of("eval:reentrant:encoder"),
    "an_encoder_that_runs_without_gradients_under_autocast": _of(
        "eval:reentrant:encoder", autocast="forward"
    ),
    "chunks_that_are_joined": Program(
        chunks=(ChunkSpec(), ChunkSpec()), num_slots=(1, 1), links="joined"
    ),
    "one_backward_through_two_engines": Program(
        chunks=(ChunkSpec(), ChunkSpec()),
        num_slots=(1, 1),
        engines="each",
        tied=True,
        links="joined",
        steps=(ONCE, Step(2)),
    ),
    "a_head_outside_of_the_chunk_whose_weight_is_tied": _of(
        "linear", loss="tied", steps=(ONCE, Step(2), Step(2, zero="never"))
    ),
    "one_backward_through_a_chunk_that_runs_eagerly_since_its_capture_failed": Program(
        chunks=(ChunkSpec(), ChunkSpec(("item",))),
        steps=(ONCE, Step(2), Step(2, zero="never")),
        num_slots=(1, 1),
        links="joined",
        engines="each",
        tied=True,
        on_failure="eager",
    ),
    "a_hook_on_an_output_that_others_come_from": _inside("hook_output", SEVERAL),
    "such_a_hook_in_a_warmup_step": Program(
        chunks=(ChunkSpec(("linear",), "tuple", ("head!",)),),
        steps=(Step(1, inside=(Action(at=1, name="hook_output", value=1),)),),
        num_slots=(2,),
    ),
    "the_gradient_of_an_output_that_others_come_from": _inside("retain_output_grad", SEVERAL),
    "a_hook_on_a_layer_after_the_capture": _before("add_forward_hook"),
    "a_hook_on_a_layer_that_is_removed_after_the_capture": _of(
        "linear",
        steps=(
            Step(before=("add_forward_hook",)),
            ONCE,
            Step(before=("remove_forward_hooks",)),
            ONCE,
        ),
    ),
    "another_dropout_probability": _before("anneal"),
    "another_epsilon": _before("change_epsilon"),
    "a_tensor_elsewhere_that_warmup_passes_write": _of("elsewhere", num_warmup_passes=1),
    "another_temperature": _elsewhere("change_temperature"),
    "another_mask_in_a_list": _elsewhere("replace_mask"),
    "another_tensor_in_a_closure": _elsewhere("replace_shift"),
    "create_graph": _inside("create_graph", SEVERAL, at=2),
    "kept_gradients_and_reentrant_checkpoints": _of(
        "twice:reentrant:gate", steps=(ONCE, Step(2, zero="in place", before=("keep_grads",)))
    ),
    "values_left_on_a_module_by_several_slots": _of(
        "metric",
        num_slots=(3,),
        steps=(ONCE, Step(3, order="wide", inside=(Action(2, "note"), Action(4, "note")))),
    ),
    "state_that_is_replaced_where_the_capture_fails": _of("state_replaced", on_failure="eager"),
    "shadow_and_a_parameter_that_the_forward_updates": _of("decay", verify="shadow"),
    "shadow_and_state_in_an_attribute": _of("state", verify="shadow"),
    "an_input_that_decides_whether_the_output_requires_grad": Program(
        chunks=(ChunkSpec(("gather",)),),
        steps=(ONCE, Step(3, inside=(Action(1, "detached_input", 3),))),
        num_slots=(2,),
        frozen=(1, 4),
    ),
    "an_evaluation_under_the_autocast_of_a_step": Program(
        chunks=(
            ChunkSpec(("encoder",)),
            ChunkSpec(("linear",)),
            ChunkSpec(("stopped", "batch_norm_eval", "alpha_dropout"), arguments=("mask", "scale")),
        ),
        steps=(
            Step(4, order="wide", seed=81, updates=False),
            Step(3, seed=29, zero="in place"),
            Step(order="wide", seed=51, inside=(Action(4, "evaluate", 1),)),
        ),
        num_slots=(3, 2, 1),
        input_grads=False,
        links="joined",
        autocast="outside",
    ),
    "a_returned_parameter_that_is_kept_until_it_is_updated": Program(
        chunks=(ChunkSpec(("linear",), form="named", extras=("parameter!",)),),
        steps=(ONCE, Step(inside=(Action(1, "keep_view", 1),))),
    ),
    "an_output_with_a_view_that_is_changed_in_a_warmup_step": Program(
        chunks=(ChunkSpec(("linear",), form="nested", extras=("view!",)),),
        steps=(Step(inside=(Action(1, "change_output"),)),),
        loss="square",
    ),
    "a_warmup_step_that_is_interrupted_before_its_backward": Program(
        chunks=(ChunkSpec(("batch_norm",)),),
        steps=(
            Step(kind="other shape"),
            Step(inside=(Action(1, "raise"),)),
            *(ONCE, ONCE),
        ),
    ),
    "a_retained_gradient_in_an_eager_step_of_a_split_backward": Program(
        chunks=(ChunkSpec(("linear",), form="dict", extras=("head!",)),),
        steps=(ONCE, ONCE, Step(kind="eager", inside=(Action(1, "retain_output_grad"),))),
        backward="split",
    ),
    "a_frozen_parameter_that_is_kept_until_it_is_thawed": Program(
        chunks=(ChunkSpec(("linear",), form="nested", extras=("parameter!",)),),
        steps=(ONCE, Step(inside=(Action(1, "keep_view", 1),), after=("thaw+release",))),
        frozen=(0,),
    ),
    "layouts_of_gradients_next_to_a_parameter": Program(
        chunks=(ChunkSpec(("batch_norm_eval",), form="nested", extras=("parameter!",)),),
        steps=(ONCE, ONCE),
        loss="square",
        watches=True,
    ),
    "a_warmup_step_without_backward": Program(
        chunks=(ChunkSpec(("encoder",)),),
        steps=(Step(inside=(Action(1, "drop"),)), ONCE, ONCE),
        autocast="step",
    ),
    "gradients_that_are_not_numbers": Program(
        chunks=(
            ChunkSpec(("eval:reentrant:encoder", "own_function")),
            ChunkSpec(("residual:bfloat16",)),
        ),
        steps=(
            Step(2),
            Step(3),
            Step(6, order="unordered", seed=13, inside=(Action(16, "scale_grads", 1),)),
            Step(zero="never", after=("zero_in_place",)),
            ONCE,
        ),
        num_slots=(3, 3),
        loss="sum",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_once_differed_is_equal_or_refused(name: str) -> None:
    verdict = compare(PROGRAMS[name])
    assert verdict.kind in ("equal", "refused"), verdict.why


# No misuse, and supporting it costs nothing.
@pytest.mark.parametrize(
    "name",
    [
        "an_output_without_gradient",
        "gradients_layout_is_that_of_eager",
        "running_statistics_after_a_session",
        "lstm",
        "a_constant_of_the_host",
        "shadow_and_running_statistics",
        "outputs_that_are_kept",
        "views_that_are_kept",
        "losses_that_are_kept",
        "gradients_that_are_kept",
        "gradients_that_are_flat",
        "gradients_that_are_replaced",
        "gradients_that_are_dropped",
        "a_frozen_parameter_captured_again",
        "a_replaced_layer_captured_again",
        "a_replaced_parameter_captured_again",
        "attention_that_runs_without_gradients",
        "an_encoder_that_runs_without_gradients",
        "chunks_that_are_joined",
        "a_retained_gradient_in_an_eager_step_of_a_split_backward",
        "a_warmup_step_that_is_interrupted_before_its_backward",
        "a_warmup_step_without_backward",
    ],
)
def test_a_program_that_once_differed_is_replayed_and_equal(name: str) -> None:
    verdict = compare(PROGRAMS[name])
    assert verdict.kind == "equal", verdict.why
    assert verdict.num_replays > 0
