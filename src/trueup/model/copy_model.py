"""Copies of models."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def copy_model(model: nn.Module) -> nn.Module:
    """Copy a model, also one that holds results of its last forward."""
    with torch.inference_mode(False):
        try:
            return copy.deepcopy(model, dict(kept_tensors(model)))
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"the model cannot be copied: {error}") from error


def kept_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Return copies, by identity, of results that modules hold as attributes: caches, old-style weight_norm.

    Views of parameters are left out: a copy of one would no longer follow its parameter.
    """
    held: list[Any] = [value for module in model.modules() for value in vars(module).values()]
    held += [v for each in held if isinstance(each, dict) for v in each.values()]
    held += [v for each in held if isinstance(each, list | tuple) for v in each]
    results = [t for t in held if isinstance(t, Tensor) and not t.is_leaf and not isinstance(t._base, nn.Parameter)]
    return {id(t): t.detach().clone() for t in results}


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot be copied and adapted."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a TorchScript model cannot be adapted; pass the module it was made from")
    for cls in type(model).__mro__:
        if cls.__module__.startswith("torch.") and cls.__name__ in ("DataParallel", "DistributedDataParallel"):
            raise TypeError(f"model is wrapped in {cls.__name__}; pass the network inside it: model.module")
        if cls.__module__.startswith("torch.") and cls.__name__ == "FullyShardedDataParallel":
            raise TypeError("model is sharded by FullyShardedDataParallel; load its full state dict into a plain model")
        if cls.__module__.startswith("ultralytics.engine"):  # its train() starts a training, its eval() may download
            raise TypeError(
                f"model is ultralytics' {type(model).__name__}, which trains and predicts files. Adapting is for "
                f"classifiers and segmenters of pixels, not for detection; of a classifier pass the network inside it, "
                f"model.model, with output=lambda answer: answer[-1] where it returns probabilities and logits"
            )
