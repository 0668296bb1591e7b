"""Copies of models."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def copy_model(model: nn.Module) -> nn.Module:
    """A deep copy, also of a model that holds results of its last forward."""
    with torch.inference_mode(False):
        try:
            return copy.deepcopy(model, dict(kept_tensors(model)))
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"the model cannot be copied: {error}") from error


def kept_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Copies, by identity, of results that modules hold as attributes: caches, old-style weight_norm.

    Views of parameters are left out: a copy of one would no longer follow its parameter.
    """
    held: list[Any] = [value for module in model.modules() for value in vars(module).values()]
    held += [v for each in held if isinstance(each, dict) for v in each.values()]
    held += [v for each in held if isinstance(each, list | tuple) for v in each]
    loose = [t for t in held if isinstance(t, Tensor) and not t.is_leaf and not isinstance(t._base, nn.Parameter)]
    return {id(t): t.detach().clone() for t in loose}
