"""The state of an optimiser as named tensors and plain values, and back again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trueup.core.method import GradientMethod, Method

Scalars = dict[str, dict[str, Any]]


def split_state(state: dict[int, dict[str, Any]]) -> tuple[dict[str, Tensor], Scalars]:
    """Return the tensors of an optimiser's state by "parameter/key", and its plain values."""
    tensors: dict[str, Tensor] = {}
    scalars: Scalars = {}
    for i, values in state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{i}/{key}"] = value
            else:
                scalars.setdefault(str(i), {})[key] = value
    return tensors, scalars


def join_state(
    method: Method, optimizer: torch.optim.Optimizer | None, tensors: dict[str, Tensor], scalars: Scalars
) -> dict[str, Any]:
    """Return a state for `load_state_dict`, checked, because a fused step does not check sizes."""
    if optimizer is None:
        if tensors or scalars:
            raise ValueError("the file has the state of an optimiser, and this adapter has no optimiser")
        return {}
    state: dict[int, dict[str, Any]] = {int(i): dict(values) for i, values in scalars.items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, tensor in tensors.items():
        i, _, key = name.partition("/")
        state.setdefault(int(i), {})[key] = laid_out_like(tensor, parameters[int(i)])
    expected = _expected_state(method, parameters[0])
    for at, values in state.items():
        if not 0 <= at < len(parameters) or values.keys() != expected.keys():
            raise ValueError(f"parameter {at} has {sorted(values)} in the optimiser, not {sorted(expected)}")
        for key, value in values.items():
            shape = parameters[at].shape if isinstance(expected[key], Tensor) and expected[key].ndim else torch.Size()
            if isinstance(value, Tensor) != isinstance(expected[key], Tensor):
                raise ValueError(f"{key} of parameter {at} is a {type(value).__name__}")
            if isinstance(value, Tensor) and (value.shape != shape or not value.is_floating_point()):
                raise ValueError(f"{key} of parameter {at} is {tuple(value.shape)} {value.dtype}")
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def follow_parameters(optimizer: torch.optim.Optimizer | None) -> None:
    """Let an optimiser's state follow its parameters to their device, precision and layout."""
    if optimizer is None:
        return
    optimizer.load_state_dict(optimizer.state_dict())  # which moves and converts
    for p, kept in optimizer.state.items():
        kept |= {key: laid_out_like(value, p) for key, value in kept.items() if isinstance(value, Tensor)}


def laid_out_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a value in the memory layout of its parameter, which fused steps rely on; others as they are."""
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _expected_state(method: Method, like: Tensor) -> dict[str, Any]:
    """Return what the method's optimiser keeps of a parameter, found by a trial step."""
    assert isinstance(method, GradientMethod)
    trial = nn.Parameter(torch.zeros(2, dtype=like.dtype, device=like.device))
    optimizer = method.optimizer([("trial", trial)])
    trial.grad = torch.zeros_like(trial)
    optimizer.step()
    return dict(optimizer.state[trial])
