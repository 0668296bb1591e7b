"""Checks of models and inputs, made before anything has changed."""

import torch
from torch import Tensor, nn

from trueup import devices
from trueup.finite import check_values
from trueup.model.calls import Batch


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


def check_input(x: Tensor, model: nn.Module, *, rows: bool = True) -> None:
    """Refuse a batch that the model cannot use; `rows`: also for values in a single row."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, not {type(x).__name__}")
    if x.layout != torch.strided:
        raise ValueError(f"x has the layout {x.layout}: make it dense with x.to_dense()")
    if x.ndim < 2 or x.numel() == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}: expected a batch with at least one image, (N, ...)")
    if x.dtype == torch.uint8:
        pass  # for models that normalise images themselves; others refuse it when they run
    elif not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}: convert and normalise it as in training, e.g. x.float() / 255")
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    if weight is not None:
        if x.device != weight.device:
            raise ValueError(f"x is on {x.device}, the model on {weight.device}: move one with .to(...)")
        if x.dtype not in (weight.dtype, torch.uint8) and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"x is {x.dtype}, the model {weight.dtype}: convert x with x.to({weight.dtype})")
    for i, other in enumerate(x.others if isinstance(x, Batch) else (), 2):
        if other.device != x.device:
            raise ValueError(f"input {i} is on {other.device}, the images on {x.device}: move one with .to(...)")
        if other.is_floating_point() and bool(other.isnan().any()):  # infinite values may mean something in a mask
            raise ValueError(f"input {i} has values that are NaN")
    if rows and not devices.waits(x):  # on other devices the forward pass checks it, to wait only once
        check_values(x)


def check_logits(logits: Tensor, *, multilabel: bool) -> None:
    """Refuse probabilities: a softmax of them is nearly uniform, and nothing can be learnt from that."""
    values = logits.detach().float()
    if not multilabel and bool((values >= 0).all()) and bool(((values.sum(dim=1) - 1).abs() < 1e-4).all()):
        raise ValueError("the model returns probabilities, not logits: leave out its softmax, or pass output=torch.log")
