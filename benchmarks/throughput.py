"""Images per second and peak memory of methods, with the bare network and the released TSD's whole step.

torchvision's networks with 1,000 classes at 224 pixels; every bank is full (M = 100). The variants take turns in one
process; ratios are to the network's own forward, backward and Adam step. "tsd-late" updates the last stage of a ResNet,
the last third of a transformer's blocks; "tsd-low" updates all with memory="low". All use fused Adam.

Resident memory is measured in one process per variant: what it holds before its first step besides the given network
(copies, a bank), and what two steps add at their peak. Freed memory returns to the system at once, so that resident
memory is memory in use.

Run: python benchmarks/throughput.py [--quick] [--rounds 3]
"""

import copy
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from bank import K, Released
from measure import asked_rounds, bare_step, milliseconds, quartiles, take_turns, write
from memory import resident
from step import CLASSES, M, fill
from torch import Tensor, nn

import trueup
from trueup.losses import entropy, kl_divergence
from trueup.memory.bank import Bank

# Network, batch, rounds, and its late parameters.
CASES = [
    ("resnet18", 32, 5, r"layer4"),
    ("resnet50", 16, 5, r"layer4"),
    ("vit_b_16", 8, 5, r"encoder_layer_(8|9|10|11)\."),
]
VARIANTS = ("forward", "bare", "source", "bn", "t3a", "tent", "tsd-late", "tsd-norm", "tsd-all", "tsd-low", "released")
Step = Callable[[Tensor], object]


def network(name: str, size: int) -> nn.Module:
    torch.manual_seed(0)
    vit = name.startswith("vit")
    model: nn.Module = torchvision.models.get_model(name, weights=None, **({"image_size": size} if vit else {}))
    if vit:  # its head starts at zero: all classes would tie, and the entropy has no gradient
        nn.init.normal_(head_of(model).weight, std=0.02)
    return model.eval()


def head_of(model: nn.Module) -> nn.Linear:
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return linear[-1]


def bare_forward(model: nn.Module) -> Step:
    """Return a forward of the network alone, with its own statistics."""

    @torch.no_grad()
    def step(x: Tensor) -> None:
        model(x)

    return step


class ReleasedStep:
    """The released code's step, re-created: the bank as in bank.py, the neighbours' loss with weight 0."""

    def __init__(self, model: nn.Module, per_class: int) -> None:
        self.model = copy.deepcopy(model).train()
        self.head = head_of(self.model)
        self.head.register_forward_hook(self._note)
        bank = Bank(CLASSES, self.head.in_features, per_class, self.head.weight)
        fill(bank, per_class)
        self.bank = Released(bank)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)

    def _note(self, layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        self.z = args[0]

    def __call__(self, x: Tensor) -> Tensor:
        p: Tensor = self.model(x)
        z, s = self.z, F.softmax(p, dim=1)
        with torch.no_grad():
            prototypes = self.bank.insert(z.detach(), s.detach(), p.argmax(dim=1), entropy(p)).T
        u = F.normalize(z, p=1, dim=1) @ F.normalize(prototypes, p=1, dim=1).T
        loss = kl_divergence(u, s.detach()).mean() + 0 * self._local(z.detach(), p)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return p.detach()

    def _local(self, z: Tensor, p: Tensor) -> Tensor:
        stored = F.normalize(F.normalize(self.bank.z, p=2, dim=1), p=1, dim=1)
        similarity, rows = (F.normalize(z, p=1, dim=1) @ stored.T).topk(K, dim=1)
        return -(similarity * (p.unsqueeze(1) - self.bank.q[rows]).square().sum(dim=2)).mean()


def make(variant: str, model: nn.Module, late: str, size: int, per_class: int) -> Step:
    """Return a step of a variant; its bank is full."""
    if variant in ("forward", "bare"):
        return bare_forward(model) if variant == "forward" else bare_step(model)
    if variant == "released":
        return ReleasedStep(model, per_class)
    method, _, params = variant.partition("-")
    hyper: dict[str, Any] = {"params": late if params == "late" else params} if params else {}
    if params == "low":
        hyper = {"params": "all", "memory": "low"}
    if method in ("tsd", "t3a"):
        hyper["per_class"] = per_class
    adapter = trueup.adapt(model, method, example=torch.randn(2, 3, size, size), **hyper)
    if isinstance(adapter.state, Bank):
        fill(adapter.state, per_class)
    return adapter


def speed(
    name: str, variants: Sequence[str], late: str, batch: int, size: int, rounds: int, per_class: int
) -> list[dict[str, Any]]:
    """Return a row for each variant."""
    model = network(name, size)
    steps = {variant: make(variant, model, late, size, per_class) for variant in variants}
    times = take_turns(steps, rounds, lambda: torch.randn(batch, 3, size, size), warm=1)
    return [
        {
            "network": name,
            "variant": variant,
            "batch": batch,
            "pixels": size,
            "classes": CLASSES,
            "per_class": per_class,
            "rounds": rounds,
            "ms": milliseconds(times[variant]),
            "images_per_second": round(batch / statistics.median(times[variant]), 2),
            "over_bare": quartiles(times[variant], times["bare"]),
        }
        for variant in variants
    ]


def memory(name: str, variant: str, late: str, batch: int, size: int, per_class: int) -> dict[str, float]:
    """Return the megabytes of this fresh process."""
    model = network(name, size)
    given = resident()
    step = make(variant, model, late, size, per_class)
    held = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    for _ in range(2):  # Adam's moments exist from the second step on
        step(torch.randn(batch, 3, size, size))
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    return {"holds_mb": round(held - given, 1), "step_mb": round(peak - held, 1)}


def in_a_process(*case: Any) -> dict[str, float]:
    command = [sys.executable, __file__, "--memory", json.dumps(case)]
    eager = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=eager)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def main() -> None:
    if "--memory" in sys.argv:
        print(json.dumps(memory(*json.loads(sys.argv[-1]))))
        return
    quick, keep, rows = "--quick" in sys.argv, True, []
    size, per_class = (32, 2) if quick else (224, M)
    print(f"{torch.get_num_threads()} threads; ratios to forward + backward + Adam; memory in MB")
    for name, batch, usual, late in CASES[::2] if quick else CASES:
        rounds, enough = asked_rounds(usual)
        keep &= enough
        batch = 4 if quick else batch
        few = quick and name == "vit_b_16"
        timed = speed(name, ("bare", "tsd-late") if few else VARIANTS, late, batch, size, rounds, per_class)
        gc.collect()  # free banks and graphs before other processes need memory
        for row in timed:
            if not quick or (name, row["variant"]) == ("resnet18", "tsd-all"):
                row |= in_a_process(name, row["variant"], late, batch, size, per_class)
            rows.append(row)
            show(row)
    if keep:
        write("throughput", rows)


def show(row: dict[str, Any]) -> None:
    low, median, high = row["over_bare"]
    print(
        f"{row['network']:8} {row['variant']:8} batch {row['batch']}: {row['images_per_second']:7.2f} images/s; "
        f"ratio {median:.3f} (quartiles {low:.3f}, {high:.3f})",
        f"holds {row['holds_mb']}, steps {row['step_mb']}" if "holds_mb" in row else "",
        flush=True,
    )


if __name__ == "__main__":
    main()
