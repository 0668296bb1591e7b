"""What BatchNorm layers normalise with: the source's statistics, the batch's, or running estimates.

"robust" estimates are used here as they stand, like the source's; `core/robust.py` moves them after a forward.

A policy is chosen for the time of one forward pass. The layers' own buffers are put back afterwards, also when the
forward fails; only a policy that keeps estimates writes them, and only when the whole forward went well.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Moments = tuple[Tensor, Tensor]  # mean and biased variance per channel
Optional = tuple[Tensor | None, Tensor | None]

MOMENTUM = 0.1


def ema(running: Moments, batch: Moments) -> Moments:
    """Running estimates: they start at the source's and move a tenth of the way to each batch's."""
    return running[0].lerp(batch[0], MOMENTUM), running[1].lerp(batch[1], MOMENTUM)


# A policy maps (running, batch) moments to those to normalise with and to keep; the gradient sees them as constants.
# "source" and "batch" are torch's own two modes; in "batch" the gradient flows through the statistics.
POLICIES: dict[str, Callable[[Moments, Moments], Moments] | None] = {
    "source": None,
    "batch": None,
    "ema": ema,
    "robust": None,
}


@contextmanager
def normalizing(model: nn.Module, policy: str, *, update: bool, fewest: int = 2) -> Iterator[None]:
    """Let the BatchNorm layers of a model in eval mode follow a policy.

    With `update` the estimates of a policy that keeps some move to the batch first; else they are used as they stand. A
    layer that sees fewer than `fewest` values per channel keeps its own statistics: one value has no variance.
    """
    rule = POLICIES[policy]
    if policy in ("source", "robust") or (rule is not None and not update):
        yield
        return
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    kept = {layer: (layer.running_mean, layer.running_var) for layer in layers}

    def prepare(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, _BatchNorm)
        x = args[0].detach()
        if x.numel() < fewest * x.shape[1]:
            layer.running_mean, layer.running_var = kept[layer]
        elif rule is None:
            layer.running_mean = layer.running_var = None  # so that torch takes the batch's and updates nothing
        else:
            assert layer.running_mean is not None
            assert layer.running_var is not None
            running = (layer.running_mean, layer.running_var)
            variance, mean = torch.var_mean(x, dim=[d for d in range(x.ndim) if d != 1], correction=0)
            layer.running_mean, layer.running_var = rule(running, (mean.to(running[0]), variance.to(running[0])))

    def put_back(layer: nn.Module, args: object, out: object) -> None:
        if rule is None:
            assert isinstance(layer, _BatchNorm)
            layer.running_mean, layer.running_var = kept[layer]

    handles = [layer.register_forward_pre_hook(prepare) for layer in layers]
    handles += [layer.register_forward_hook(put_back) for layer in layers]
    try:
        yield
        used = [(layer.running_mean, layer.running_var) for layer in layers]
    finally:
        for handle in handles:
            handle.remove()
        for layer, (mean, variance) in kept.items():
            layer.running_mean, layer.running_var = mean, variance
    if rule is not None:
        _keep(list(kept.values()), used)


def _keep(running: Sequence[Optional], used: Sequence[Optional]) -> None:
    """Copy moments into the running estimates, unless they are not finite."""
    pairs = [(r, u) for old, new in zip(running, used, strict=True) for r, u in zip(old, new, strict=True)]
    if not all(u is None or bool(u.isfinite().all()) for _, u in pairs):
        raise ValueError("the batch's normalisation statistics are not finite: its values are too large for this model")
    with torch.no_grad():
        for target, value in pairs:
            if target is not None and value is not None and value is not target:
                target.copy_(value)
