"""How often a device would be waited for: each tensor that Python looks into makes the host stand still."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import trueup
from trueup import devices
from trueup.testing import convnet, images

WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "_unique2", "equal")
XS = [images(24, seed=i, shift=1.0)[0] for i in range(8)]


class Watch(TorchDispatchMode):
    """Counts operations whose result the host must have."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] if i is not None
        )
        if name in WAITS or name.startswith("unique") or masks:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("method", "hyper", "most"),
    [
        ("source", {}, 2),  # the input and the answer; elsewhere than on a CPU one look serves both
        ("bn", {}, 2),
        ("tent", {}, 3),  # and whether to step
        ("tsd", {"per_class": 4}, 3),
        ("tsd", {"per_class": 4, "norm": "ema"}, 4),  # and the statistics of all layers together
    ],
    ids=str,
)
def test_a_step_waits_only_to_decide(
    method: str, hyper: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "waits", lambda tensor: True)  # as on a device
    adapter = trueup.adapt(convnet(), method, **hyper)
    for x in XS[:6]:
        adapter(x)
    for x in XS[6:]:
        with Watch() as watch:
            adapter(x)
        assert watch.seen.total() <= most, watch.seen
