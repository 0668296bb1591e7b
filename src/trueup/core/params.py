"""Which parameters a method updates: chosen by name, and loudly when nothing matches."""

import re
from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

Params = str | Callable[[str], bool]

KEYWORDS = ("none", "norm", "head", "backbone", "all")
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def select(model: nn.Module, params: Params, head: str | None) -> dict[str, nn.Parameter]:
    """The floating-point parameters that `params` names, whatever their requires_grad says.

    `params` is one of "none", "norm", "head", "backbone", "all"; or a regular expression, searched in each name; or a
    function of the name.
    """
    every = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    if params == "none":
        return {}
    if params in ("head", "backbone") and head is None:
        raise ValueError(f"params={params!r} needs the model's head, which was not found; name it with head=")
    of_head = {name for name, p in every.items() if head is not None and _inside(model, head, p)}
    wanted: Callable[[str], bool]
    if params == "all":
        wanted = every.__contains__
    elif params == "norm":
        wanted = _norm_names(model).__contains__
    elif params == "head":
        wanted = of_head.__contains__
    elif params == "backbone":
        wanted = (every.keys() - of_head).__contains__
    elif isinstance(params, str):
        pattern = re.compile(params)
        wanted = lambda name: pattern.search(name) is not None  # noqa: E731
    else:
        wanted = params
    chosen = {name: p for name, p in every.items() if wanted(name)}
    if not chosen:
        shown = ", ".join(list(every)[:4]) or "it has none"
        raise ValueError(
            f"nothing to update: params={params!r} matches no parameter of the model (its names: {shown}, ...); "
            f"use one of {', '.join(KEYWORDS)}, a regular expression or a function of the name"
        )
    return chosen


def _inside(model: nn.Module, head: str, parameter: nn.Parameter) -> bool:
    return any(p is parameter for p in model.get_submodule(head).parameters())


def _norm_names(model: nn.Module) -> set[str]:
    """Names of the affine parameters of normalisation layers: torch's own, and others' that are called so.

    A layer of another library counts if its class has "norm" in its name, each of its parameters is a vector and no
    layer in it has any: a linear layer that normalises its weights is none, nor is a block that has normalisation.
    """
    names = set()
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        simple = all(p.numel() == max(p.shape, default=1) for p in own.values())
        simple &= len(own) == len(list(module.parameters()))
        if isinstance(module, _NORMS) or ("norm" in type(module).__name__.lower() and simple):
            names |= {f"{prefix}.{name}" if prefix else name for name in own}
    return names
