"""Selection of the parameters that a method updates; it is an error if nothing matches."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

Params = str | Callable[[str], bool]

KEYWORDS = ("none", "norm", "head", "backbone", "all", "trainable")
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def select_parameters(
    model: nn.Module, params: Params, head: str | None, flags: Mapping[str, bool] | None = None
) -> dict[str, nn.Parameter]:
    """Select the floating-point parameters that `params` names.

    `params` is one of "none", "norm", "head", "backbone", "all", "trainable"; or a regular expression, searched in each
    name; or a function of the name. Only "trainable" looks at requires_grad: at `flags` by name, or the model's own.
    """
    every = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    if params == "none":
        return {}
    if params in ("head", "backbone") and head is None:
        raise ValueError(f"params={params!r} needs the model's head, which was not found; name it with head=")
    in_head = set() if head is None else set(model.get_submodule(head).parameters())
    head_names = {name for name, p in every.items() if p in in_head}
    if not isinstance(params, str):
        names = {name for name in every if params(name)}
    elif params == "trainable":
        flags = flags if flags is not None else {name: p.requires_grad for name, p in every.items()}
        names = {name for name in every if flags.get(name, True)}
    elif params in KEYWORDS:
        others = every.keys() - head_names
        names = {"all": {*every}, "norm": _norm_names(model), "head": head_names, "backbone": others}[params]
    else:
        pattern = re.compile(params)
        names = {name for name in every if pattern.search(name)}
    chosen = {name: p for name, p in every.items() if name in names}
    if not chosen:
        raise ValueError(f"nothing to update: {_why_nothing(model, params, list(every))}")
    return chosen


def _why_nothing(model: nn.Module, params: Params, names: list[str]) -> str:
    """Say why `params` selects nothing, and the way out."""
    shown = ", ".join(names[:4]) or "it has none"
    if params == "trainable":
        return (
            "params='trainable' selects what requires grad, and the model is frozen as a whole; call "
            "requires_grad_(True) on the layers to update, or choose them with params='all', 'norm' or their names"
        )
    if params == "norm" and (kinds := describe_norms(model)):
        return (
            f"params='norm', but the normalisation layers of the model ({kinds}) have no affine parameters; update "
            f"others, with a small lr: params='all', 'backbone', 'head' or a regular expression (the model's names: "
            f"{shown}, ...)"
        )
    return (
        f"params={params!r} matches no parameter of the model (its names: {shown}, ...); use one of "
        f"{', '.join(KEYWORDS)}, a regular expression or a function of the name"
    )


def describe_norms(model: nn.Module) -> str:
    """Name the kinds of normalisation layers that a model has, and how many; "" if it has none."""
    kinds = Counter(type(layer).__name__ for layer in norm_layers(model))
    return ", ".join(f"{n} × {kind}" for kind, n in kinds.items())


def _norm_names(model: nn.Module) -> set[str]:
    """Return the names of the affine parameters of normalisation layers."""
    layers = set(norm_layers(model))
    own = {path: m.named_parameters(recurse=False) for path, m in model.named_modules() if m in layers}
    return {f"{path}.{name}" if path else name for path, found in own.items() for name, _ in found}


def norm_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield normalisation layers: torch's own, and those of other libraries, known by their names.

    A layer of another library counts if its class has "norm" in its name, each of its parameters is a vector and no
    layer in it has any. This excludes linear layers that normalise their weights and blocks that contain a norm.
    """
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        simple = all(p.numel() == max(p.shape, default=1) for p in own.values())
        simple &= len(own) == len(list(module.parameters()))
        if isinstance(module, _NORMS) or ("norm" in type(module).__name__.lower() and simple):
            yield module
