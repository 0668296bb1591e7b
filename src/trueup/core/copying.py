"""Copies of models that share nothing with the original."""

import copy

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
    """Copies, by identity, of results that modules hold as attributes: caches, old-style weight_norm."""
    held = [t for module in model.modules() for t in vars(module).values() if isinstance(t, Tensor) and not t.is_leaf]
    return {id(t): t.detach().clone() for t in held}
