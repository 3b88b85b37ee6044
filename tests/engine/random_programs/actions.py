"""Actions of the caller between and inside the steps of a random program."""

from __future__ import annotations

import copy
from typing import TypeGuard

import torch
from torch import nn

from .layers import Elsewhere
from .model import new_input, parts_of
from .programs import Action
from .world import Flight, InterruptedStepError, World


def between(world: World, name: str) -> None:
    """Act between two steps; "name+release" captures again afterwards."""
    name, _, release = name.partition("+")
    _release_if(world, bool(release))
    _between(world, name)


def _release_if(world: World, is_wanted: bool) -> None:
    if is_wanted:
        for engine in world.engines:
            engine.release()


def _between(world: World, name: str) -> None:
    parameters = world.parameters
    match name:
        case "release":
            _release_if(world, True)
        case "sleep":
            for engine in world.engines:
                engine.sleep()
                engine.wake()
        case "load_state_dict" | "assign_state_dict":
            for chunk, state in zip(world.chunks, world.saved_state, strict=True):
                values = {k: v.clone() for k, v in state.items()}
                chunk.load_state_dict(values, strict=False, assign=name == "assign_state_dict")
        case "average" | "swap_in_place":
            with torch.no_grad():
                for mean, parameter in zip(world.average, parameters, strict=True):
                    if name == "average":
                        parameter.copy_(mean)
                    else:
                        now = parameter.detach().clone()
                        parameter.copy_(mean)
                        mean.copy_(now)
        case "swap_data":
            for mean, parameter in zip(world.average, parameters, strict=True):
                parameter.data, mean.data = mean.data, parameter.data
        case "change_rate":
            world.optimizer.param_groups[0]["lr"] *= 0.5
        case "deepcopy":
            twins = copy.deepcopy(world.chunks)
            with world.evaluating():
                x = new_input()
                for twin in twins:
                    twin.eval()
                    x, _ = parts_of(twin.spec.form, twin(x))
            world.see("deepcopy", x)
        case "flat_grads":
            own = [p for p in parameters if p.requires_grad and p.dtype is torch.float32]
            flat = torch.zeros(sum(p.numel() for p in own))
            views = flat.split([p.numel() for p in own])
            for parameter, view in zip(own, views, strict=True):
                parameter.grad = view.view(parameter.shape)
            world.keep("flat gradients", flat)
        case "replace_parameter":
            first = world.chunks[0].first
            first.weight = nn.Parameter(first.weight.detach() * 0.5)
            _new_parameters(world)
        case "replace_layer":
            layers = world.chunks[0].layers
            layers[len(layers) - 1] = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
            _new_parameters(world)
        case "add_hook":
            seen: list[torch.Tensor] = []
            world.handles.append(
                world.chunks[0].first.bias.register_hook(lambda g: seen.append(g) or g * 2)
            )
        case "add_forward_hook":
            first = world.chunks[0].first
            world.handles.append(first.register_forward_hook(lambda m, args, y: y * 2))
        case "anneal" | "change_epsilon":
            key, value = ("p", 0.6) if name == "anneal" else ("eps", 0.1)
            for chunk in world.chunks:
                for module in chunk.modules():
                    if isinstance(getattr(module, key, None), float):
                        setattr(module, key, value)
        case "change_temperature" | "replace_mask" | "replace_shift":
            for part in (m for chunk in world.chunks for m in chunk.modules()):
                if not isinstance(part, Elsewhere):
                    continue
                if name == "change_temperature":
                    part.temperature *= 0.5
                elif name == "replace_mask":
                    part.masks[0] = part.masks[0] * 0.5
                else:
                    part.replace()
        case "as_vector":
            own = [p for p in parameters if p.dtype is torch.float32]
            vector = torch.nn.utils.parameters_to_vector(own)
            torch.nn.utils.vector_to_parameters(vector * 0.9, own)
        case "main_data_transposed":
            first = world.chunks[-1].first
            first.weight.data = first.weight.data.t()
        case "backward_outside":
            args, kwargs = world._arguments(0, new_input(), set())
            main, _ = parts_of(world.program.chunks[0].form, world.calls[0](*args, **kwargs))
            main.float().sum().backward()
        case _:
            _anywhere(world, Action(0, name))


def _new_parameters(world: World) -> None:
    from .model import parameters_of

    world.parameters = parameters_of(world.chunks)
    world.optimizer = world._new_optimizer()
    world.average = [p.detach().clone() for p in world.parameters]


_OF_THE_NEXT_CALL = {
    "no_autocast": "no autocast",
    "change_scale": "scale",
    "negative_zero": "negative zero",
    "nan_scale": "nan",
    "other_strides": "strides",
    "same_tensor_twice": "same tensor",
    "same_input": "same",
    "change_options": "options",
    "expanded_input": "expanded",
    "leaf_input": "leaf",
}
_OF_THE_NEXT_BACKWARD = {
    "autocast_backward": "autocast",
    "skip_extras": "skip",
    "retain_graph": "retain",
    "drop": "drop",
    "create_graph": "create",
    "keep_loss": "keep",
}


def inside(world: World, action: Action) -> None:
    """Act before an event of a step."""
    name = action.name
    if name in _OF_THE_NEXT_CALL:
        world.once.call.add(_OF_THE_NEXT_CALL[name])
        return
    if name in _OF_THE_NEXT_BACKWARD:
        world.once.backward.add(_OF_THE_NEXT_BACKWARD[name])
        return
    flights = list(world.flights.values())
    flight = flights[action.value % len(flights)] if flights else None
    match name:
        case "raise":
            raise InterruptedStepError
        case "optimizer_step":
            world.optimizer.step()
            world.optimizer.zero_grad()
        case "write_input" if flight is not None and not flight.extras:
            with torch.no_grad():
                flight.x.mul_(2)
        case "keep_output" if flight is not None:
            world.keep("output", flight.main)
        case "keep_detached" if flight is not None:
            world.keep("detached output", flight.main.detach())
        case "keep_view" if flight is not None:
            world.keep("view", flight.main.detach()[..., :1])
            addresses = {p.data_ptr() for p in world.parameters if p.requires_grad}
            for extra in flight.extras:
                if isinstance(extra, torch.Tensor):
                    # A replay returns a tensor in the memory of a trained parameter; it takes part
                    # in the backward, and so stays as it is if the parameter is frozen later.
                    is_trained = extra.data_ptr() in addresses
                    world.keep("further output", extra.detach() if is_trained else extra)
        case "change_output" if flight is not None and not flight.extras:
            if action.value % 2:
                flight.main.detach().mul_(2)
            else:
                flight.main.mul_(2)
        case "hook_input" if flight is not None and flight.x.is_leaf and flight.x.requires_grad:
            flight.x.register_hook(lambda grad: world.see("input hook", grad))
        case "hook_output" if _is_alone(flight):
            flight.main.register_hook(lambda grad: world.see("hook", grad))
        case "retain_output_grad" if _is_alone(flight):
            flight.main.retain_grad()
            world.retained.append(flight.main)
        case "note":
            world.see_all()
        case _:
            _anywhere(world, action)


def _is_alone(flight: Flight | None) -> TypeGuard[Flight]:
    """Return whether no other output is computed from the main one, which takes a gradient."""
    return flight is not None and not flight.extras and flight.main.requires_grad


def _anywhere(world: World, action: Action) -> None:
    parameters, value = world.parameters, action.value
    chosen = parameters[(value * 3) % len(parameters)]
    parts = [module for chunk in world.chunks for module in chunk.modules()]
    part = parts[-1 - value % len(parts)]
    grads = [p.grad for p in parameters if p.grad is not None]
    match action.name:
        case "draw":
            world.see("drawn", torch.rand(2))
        case "clip":
            # A replay gives a `.grad` of the caller its parameter's strides (docs/contract.md).
            norm = torch.nn.utils.get_total_norm([grad.contiguous() for grad in grads])
            torch.nn.utils.clip_grads_with_norm_(parameters, 0.1, norm)
            world.see("norm", norm)
        case "read_grads":
            world.see_grads()
        case "keep_grads":
            for grad in grads:
                world.keep("gradient", grad)
        case "scale_grads":
            for grad in grads:
                grad.mul_(0.5)
        case "replace_grads":
            for parameter in parameters[:: 1 + value]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * 0.5
        case "zero_to_none":
            world.optimizer.zero_grad(set_to_none=True)
        case "zero_in_place":
            world.optimizer.zero_grad(set_to_none=False)
        case "zero_some":
            for parameter in parameters[value % 2 :: 2]:
                parameter.grad = None
        case "freeze":
            chosen.requires_grad_(False)
        case "thaw":
            for parameter in parameters:
                parameter.requires_grad_()
        case "eval_part":
            part.eval()
        case "train_part":
            part.train()
        case "seed":
            torch.manual_seed(value)
        case "preset_grads" | "preset_transposed_grads":
            for parameter in parameters:
                if parameter.requires_grad:
                    gradient = torch.ones_like(parameter)
                    if action.name == "preset_transposed_grads" and gradient.dim() == 2:
                        gradient = torch.ones(parameter.shape[::-1], dtype=parameter.dtype).t()
                    parameter.grad = gradient
        case "without_gradients":
            with torch.no_grad():
                x = new_input()
                for c, call in enumerate(world.calls):
                    args, kwargs = world._arguments(c, x, set())
                    x, _ = parts_of(world.program.chunks[c].form, call(*args, **kwargs))
            world.see("without gradients", x)
        case "evaluate":
            world.evaluate(None)
        case "write_buffer":
            with torch.no_grad():
                for chunk in world.chunks:
                    for buffer in chunk.buffers():
                        if buffer.is_floating_point():
                            buffer.mul_(0.5)
