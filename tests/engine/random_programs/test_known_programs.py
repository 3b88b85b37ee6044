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


SEVERAL = ChunkSpec(form="tuple", extras=("head!", "metric!"))

PROGRAMS = {
    "an_output_without_gradient": Program(
        chunks=(ChunkSpec(form="tuple", extras=("head",)),), optimizer="adamw"
    ),
    "gradients_layout_is_that_of_eager": _of("batch_norm_eval"),
    "running_statistics_after_a_session": _of("batch_norm"),
    "lstm": _of("lstm"),
    "shadow_and_running_statistics": _of("batch_norm", verify="shadow"),
    "shadow_and_an_expanded_gradient": Program(
        chunks=(ChunkSpec(("group_norm", "batch_norm_eval"), form="list", extras=("norm!",)),),
        steps=(ONCE, Step(count=1, order="deep", seed=53)),
        verify="shadow",
        on_failure="raise",
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
    "outputs_that_are_kept": _inside("keep_output", SEVERAL),
    "views_that_are_kept": _inside("keep_view", SEVERAL),
    "losses_that_are_kept": _of("linear", loss="inside", steps=(ONCE, Step(4), ONCE)),
    "gradients_that_are_kept": _before("keep_grads"),
    "gradients_that_are_flat": _before("flat_grads"),
    "a_frozen_parameter_captured_again": _before("freeze+release"),
    "a_replaced_layer_captured_again": _before("replace_layer+release"),
    "a_replaced_parameter_captured_again": _before("replace_parameter+release"),
    "state_in_an_attribute": _of("state"),
    "a_parameter_that_the_forward_updates": _of("decay"),
    "attention_that_runs_without_gradients": _of("eval:reentrant:attention"),
    "an_encoder_that_runs_without_gradients": _of("eval:reentrant:encoder"),
    "an_encoder_that_runs_without_gradients_under_autocast": _of(
        "eval:reentrant:encoder", autocast="forward"
    ),
    "chunks_that_are_joined": Program(
        chunks=(ChunkSpec(), ChunkSpec()), num_slots=(1, 1), links="joined"
    ),
    "kept_gradients_and_reentrant_checkpoints": _of(
        "twice:reentrant:gate", steps=(ONCE, Step(2, zero="in place", before=("keep_grads",)))
    ),
    "shadow_and_a_parameter_that_the_forward_updates": _of("decay", verify="shadow"),
    "shadow_and_state_in_an_attribute": _of("state", verify="shadow"),
    "a_returned_parameter_that_is_kept_until_it_is_updated": Program(
        chunks=(ChunkSpec(("linear",), form="named", extras=("parameter!",)),),
        steps=(ONCE, Step(inside=(Action(1, "keep_view", 1),))),
    ),
    "a_warmup_step_that_is_interrupted_before_its_backward": Program(
        chunks=(ChunkSpec(("batch_norm",)),),
        steps=(
            Step(kind="other shape"),
            Step(inside=(Action(1, "raise"),)),
            *(ONCE, ONCE),
        ),
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
    "an_input_that_is_returned_and_requires_gradients_once": Program(
        chunks=(ChunkSpec(("linear",), form="tuple", extras=("identity",)),),
        steps=(Step(inside=(Action(0, "leaf_input"),)), ONCE),
        input_grads=False,
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


REFUSED = {
    "gradients_that_require_gradients",
    "a_parameter_that_is_returned",
    "chunks_that_share_a_cast",
    "an_encoder_that_runs_without_gradients_under_autocast",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_once_differed_is_equal_or_refused(name: str) -> None:
    verdict = compare(PROGRAMS[name])
    assert verdict.kind == ("refused" if name in REFUSED else "equal"), verdict.why
