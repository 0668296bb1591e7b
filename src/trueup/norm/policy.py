"""What BatchNorm layers normalise with: the source's statistics, the batch's, both mixed, or running estimates.

"robust" estimates are used here as they stand, like the source's; `norm/robust.py` moves them after a forward.
"instance" is in `norm/instance.py`.

A policy is chosen for the time of one forward pass. The layers' own buffers are put back afterwards, also when the
forward fails; only a policy that keeps estimates writes them, and only when the whole forward went well.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.finite import NotFiniteError, all_finite
from trueup.norm.instance import correcting
from trueup.norm.used_statistics import Call, UsedStatistics, batch_moments, batchnorms

Moments = tuple[Tensor, Tensor]  # mean and biased variance per channel
Optional = tuple[Tensor | None, Tensor | None]

Rule = Callable[[Moments, Moments, float, int], Moments]


def ema(running: Moments, batch: Moments, rate: float, images: int) -> Moments:
    """Running estimates: they start at the source's and move a part of the way to each batch's."""
    return running[0].lerp(batch[0], rate), running[1].lerp(batch[1], rate)


def prior(running: Moments, batch: Moments, strength: float, images: int) -> Moments:
    """The source's count for so many images, the batch's for as many as it has (Schneider et al., 2020)."""
    return ema(running, batch, images / (images + strength), images)


# A policy maps (running, batch) moments to those to normalise with; the gradient sees them as constants. "source" and
# "batch" are torch's own two modes; in "batch" the gradient flows through the statistics. Behind a colon may stand the
# policy's number: "ema:0.05".
POLICIES: dict[str, Rule | None] = {
    "source": None,
    "batch": None,
    "ema": ema,
    "mix": ema,
    "prior": prior,
    "instance": None,
    "robust": None,
}
NUMBERS = {"ema": 0.1, "mix": 0.1, "prior": 16.0, "instance": 4.0}
"""How far estimates move; the batch's part; images that the source's count for; deviations that stay uncorrected."""

KEEPING = ("ema", "instance", "robust")
"""Policies that remember what they have seen."""


def policy_of(norm: str) -> tuple[str, float]:
    """A policy's name and number; a ValueError if there is no such policy."""
    name, colon, number = norm.partition(":") if isinstance(norm, str) else ("", "", "")
    if name not in POLICIES or (colon and name not in NUMBERS):
        names = ", ".join(repr(name) for name in POLICIES)
        raise ValueError(
            f"norm={norm!r} must be one of {names}, where {', '.join(NUMBERS)} may have a number: 'ema:0.05'"
        )
    try:
        value = float(number) if colon else NUMBERS.get(name, 0.0)
    except ValueError:
        value = -1.0
    if not 0 <= value <= (1 if POLICIES[name] is ema else 1e6):
        raise ValueError(f"norm={norm!r}: {number!r} is no number that {name!r} can have, such as {NUMBERS[name]:g}")
    return name, value


@contextmanager
def applying_policy(
    model: nn.Module,
    policy: str,
    *,
    update: bool,
    fewest: int = 2,
    centred: bool = False,
    used: UsedStatistics | None = None,
) -> Iterator[None]:
    """Let the BatchNorm layers of a model in eval mode follow a policy.

    With `update` the estimates of a policy that keeps some move to the batch first; else they are used as they stand. A
    layer that sees fewer than `fewest` values per channel keeps its own statistics: one value has no variance.
    `centred` is for "instance": an image's own moments are seen beside the batch's, as in training. `used` records the
    moments that "batch", "mix" and "prior" normalise with when the forward updates.
    """
    name, number = policy_of(policy)
    if name == "instance":
        with correcting(model, number, update=update, centred=centred):
            yield
    elif name in ("source", "robust") or (name == "ema" and not update):
        yield
    else:
        with _following(model, name, number, fewest, used if update else None):
            yield


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """The policy "batch" for a graph of a model: nothing is asked call by call, so every layer must see enough."""
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    kept = [(layer, layer.running_mean, layer.running_var) for layer in layers]
    for layer in layers:
        layer.running_mean = layer.running_var = None
    try:
        yield
    finally:
        for layer, mean, variance in kept:
            layer.running_mean, layer.running_var = mean, variance


@contextmanager
def _following(model: nn.Module, name: str, number: float, fewest: int, used: UsedStatistics | None) -> Iterator[None]:
    """Put the moments of a policy in the place of the layers' own, call by call; pool them once all went well."""
    rule, calls = POLICIES[name], list[Call]()
    layers = batchnorms(model)
    kept = {layer: (layer.running_mean, layer.running_var) for layer in layers}

    def prepare(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, _BatchNorm)
        x = args[0].detach()
        if x.numel() < fewest * x.shape[1]:
            layer.running_mean, layer.running_var = kept[layer]
        elif rule is None:
            layer.running_mean = layer.running_var = None  # so that torch takes the batch's and updates nothing
            if used is not None:
                calls.append((layer, *batch_moments(x), len(x)))
        else:
            # Estimates go on from where they are; a mixture is of the source's, also where policies are nested.
            mean, variance = (layer.running_mean, layer.running_var) if name == "ema" else kept[layer]
            assert mean is not None
            assert variance is not None
            own = _moments(x)
            moments = rule((mean, variance), (own[0].to(mean), own[1].to(mean)), number, len(x))
            layer.running_mean, layer.running_var = moments
            if used is not None:
                calls.append((layer, *moments, len(x)))

    def put_back(layer: nn.Module, args: object, out: object) -> None:
        if name != "ema":
            assert isinstance(layer, _BatchNorm)
            layer.running_mean, layer.running_var = kept[layer]

    handles = [layer.register_forward_pre_hook(prepare) for layer in layers]
    handles += [layer.register_forward_hook(put_back) for layer in layers]
    try:
        yield
        last = [(layer.running_mean, layer.running_var) for layer in layers]
    finally:
        for handle in handles:
            handle.remove()
        for layer, (mean, variance) in kept.items():
            layer.running_mean, layer.running_var = mean, variance
    if name == "ema":
        keep(list(kept.values()), last)
    elif used is not None:
        used.add(layers, calls)


def _moments(x: Tensor) -> Moments:
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # squares of halves overflow
    variance, mean = torch.var_mean(x, dim=[d for d in range(x.ndim) if d != 1], correction=0)
    return mean, variance


def keep(running: Sequence[Optional], used: Sequence[Optional]) -> None:
    """Copy moments into the running estimates, unless they are not finite."""
    pairs = [(r, u) for old, new in zip(running, used, strict=True) for r, u in zip(old, new, strict=True)]
    if not all_finite(u for _, u in pairs if u is not None):
        raise NotFiniteError(
            "the batch's normalisation statistics are not finite: its values are too large for this model"
        )
    with torch.no_grad():
        for target, value in pairs:
            if target is not None and value is not None and value is not target:
                target.copy_(value)
