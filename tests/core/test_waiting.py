"""How often a device would be waited for: each tensor that Python looks into makes the host stand still."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import trueup
from trueup.testing import convnet, images

WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "_unique2", "equal")
XS = [images(24, seed=i, shift=1.0)[0] for i in range(8)]


class Watch(TorchDispatchMode):
    """Counts operations whose result the host must have."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        read = Tensor.tolist

        def tolist(tensor: Tensor) -> Any:  # no operation shows that one
            self.seen["tolist"] += 1
            return read(tensor)

        self.tolist = tolist

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] if i is not None
        )
        if name in WAITS or name.startswith("unique") or masks:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("method", "hyper"),
    [
        ("source", {}),
        ("bn", {}),
        ("tent", {}),
        ("tsd", {"per_class": 4}),
        ("tsd", {"per_class": 4, "search": "sketch"}),
        ("tsd", {"per_class": 4, "memory": "low"}),
        ("tsd", {"per_class": 4, "norm": "ema"}),  # and at the statistics of all layers together
    ],
    ids=str,
)
def test_a_step_waits_once(method: str, hyper: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether input and answer are finite, before anything is remembered, and what became of the last step."""
    monkeypatch.setattr(Tensor, "is_cpu", False)  # as on a device
    adapter = trueup.adapt(convnet(), method, **hyper)
    for x in XS[:6]:
        adapter(x)
    for x in XS[6:]:
        with Watch() as watch, pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "tolist", watch.tolist)
            adapter(x)
        assert watch.seen.total() == (2 if "norm" in hyper else 1), watch.seen
