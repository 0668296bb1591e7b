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
    of_head = {name for name, p in every.items() if head is not None and _inside(model, head, p)}
    wanted: Callable[[str], bool]
    if params == "all":
        wanted = every.__contains__
    elif params == "trainable":
        flags = flags if flags is not None else {name: p.requires_grad for name, p in every.items()}
        wanted = lambda name: flags.get(name, True)  # noqa: E731
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
    if params == "norm" and (fixed := _fixed_norms(model)):
        return (
            f"params='norm', but the normalisation layers of the model ({fixed}) have no affine parameters; update "
            f"others, with a small lr: params='all', 'backbone', 'head' or a regular expression (the model's names: "
            f"{shown}, ...)"
        )
    return (
        f"params={params!r} matches no parameter of the model (its names: {shown}, ...); use one of "
        f"{', '.join(KEYWORDS)}, a regular expression or a function of the name"
    )


def _inside(model: nn.Module, head: str, parameter: nn.Parameter) -> bool:
    return any(p is parameter for p in model.get_submodule(head).parameters())


def _fixed_norms(model: nn.Module) -> str:
    """Name the kinds of normalisation layers that a model has, and how many."""
    kinds = Counter(type(m).__name__ for m in model.modules() if isinstance(m, _NORMS))
    return ", ".join(f"{n} × {kind}" for kind, n in kinds.items())


def _norm_names(model: nn.Module) -> set[str]:
    """Names of the affine parameters of normalisation layers."""
    layers, names = set(norm_layers(model)), set()
    for prefix, module in model.named_modules():
        if module in layers:
            names |= {f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters(recurse=False)}
    return names


def norm_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield normalisation layers: torch's own, and those of other libraries, known by their names.

    A layer of another library counts if its class has "norm" in its name, each of its parameters is a vector and no
    layer in it has any: a linear layer that normalises its weights is none, nor is a block that has normalisation.
    """
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        simple = all(p.numel() == max(p.shape, default=1) for p in own.values())
        simple &= len(own) == len(list(module.parameters()))
        if isinstance(module, _NORMS) or ("norm" in type(module).__name__.lower() and simple):
            yield module
