"""Checks that a method can change something in a model, and warnings if it cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.core.method import GradientMethod, Method
from trueup.model.params import KEYWORDS, describe_norms, norm_layers, select_parameters
from trueup.norm.policy import batchnorms

log = logging.getLogger("trueup")

# A method without gradient steps that overrides none of these hooks acts only through BatchNorm statistics.
_HOOKS = ("init", "forward", "observe", "predict")


def check_effect(model: nn.Module, method: Method) -> None:
    """Refuse a model in which the method can update nothing; warn if it only sets statistics and there are none.

    `params="head"` and "backbone" are checked with the first batch, when the head is found.
    """
    if isinstance(method, GradientMethod) and method.params != "none":
        _check_differentiable(model, method)
        if method.params not in ("head", "backbone"):
            check_precision(select_parameters(model, method.params, None), method)
    elif _statistics_only(method) and not batchnorms(model):
        log.warning(
            "%s changes nothing in this model: it only sets the statistics of BatchNorm layers, and %s; "
            "use a method that updates parameters (tsd) or one that needs no BatchNorm (t3a, lame)",
            method.info.name, _why_no_statistics(model),
        )  # fmt: skip


def choose_parameters(
    model: nn.Module, method: Method, head: str | None, flags: Mapping[str, bool], warn: Callable[..., None]
) -> dict[str, nn.Parameter]:
    """Select the parameters to update; warn once if the user has frozen some of them, but not the whole model."""
    if not isinstance(method, GradientMethod):
        return {}
    params = method.params
    selected = select_parameters(model, params, head, flags)
    check_precision(selected, method)
    frozen = [name for name in selected if not flags.get(name, True)]
    # A model that is frozen as a whole was frozen for inference; expressions and functions select explicitly.
    if frozen and any(flags.values()) and params in KEYWORDS:
        advice = 'params="trainable"' if params == "all" else "a regular expression or a function of the name as params"
        warn(
            "%s updates parameters with requires_grad=False, as params=%r asks: %d of %d (%s); leave them out with %s",
            method.info.name, params, len(frozen), len(selected), _shown(frozen), advice,
        )  # fmt: skip
    return selected


def check_precision(selected: Mapping[str, Tensor], method: Method) -> None:
    """Refuse to update 16-bit weights: most steps are smaller than the distance to the next representable number.

    Near 1 that distance is 0.008 in bfloat16 and 0.001 in float16; a step of Tent is 0.001.
    """
    halves = {name: t.dtype for name, t in selected.items() if t.dtype in (torch.float16, torch.bfloat16)}
    for name, dtype in halves.items():
        kind = "fp16" if dtype == torch.float16 else "bf16"
        raise ValueError(
            f"{method.info.name} would update 16-bit weights ({name} is {dtype}), where rounding loses its steps: pass "
            f'model.float(); with precision="{kind}" it still runs in 16 bits, and learns in 32'
        )


def _check_differentiable(model: nn.Module, method: GradientMethod) -> None:
    """Refuse quantised layers, through which no gradient flows; the head alone may still learn."""
    quantised = [name or type(module).__name__ for name, module in model.named_modules() if _quantised(module)]
    if quantised and method.params != "head":
        raise ValueError(
            f"the model has quantised layers ({_shown(quantised)}), through which no gradient flows, so "
            f"{method.info.name} with params={method.params!r} would update nothing: adapt the model before "
            'quantisation and quantise adapter.unwrap(), or update a head that is not quantised with params="head"'
        )


def _quantised(module: nn.Module) -> bool:
    """Return True for layers with packed integer weights, but not for their float placeholders."""
    package, name = type(module).__module__, type(module).__name__
    packages = ("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")
    return package.startswith(packages) and hasattr(module, "_packed_params") and not name.endswith("PackedParams")


def _statistics_only(method: Method) -> bool:
    """Return True if a method without gradient steps acts only through BatchNorm statistics."""
    own = any(getattr(type(method), hook) is not getattr(Method, hook) for hook in _HOOKS)
    return method.norm != "source" and not own


def _why_no_statistics(model: nn.Module) -> str:
    """Explain why no layer's statistics can be set."""
    if any(name.endswith("running_mean") for name, _ in model.named_buffers()) and hasattr(model, "graph"):
        return "those of an exported graph cannot be reached (adapt the module that was exported)"
    found = describe_norms(model)
    if not found:
        return "it has no normalisation layers"
    batch = any(isinstance(layer, _BatchNorm) for layer in norm_layers(model))
    reason = "they keep no running statistics, so they use the batch's already" if batch else "it has none of these"
    return f"{reason} ({found})"


def _shown(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
