"""TSD as the paper defines it, written down step by step with no care for speed and nothing from the package."""

import copy
import math

import torch
from torch import Tensor, nn


class BruteForceTsd:
    """One batch at a time; the bank is a list of all entries that ever came, filtered anew every time."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        per_class: int | None,
        neighbors: int,
        alignment: float,
        consistency: bool,
        params: str,
        norm: str,
    ) -> None:
        self.model = copy.deepcopy(model).eval()
        self.m, self.k, self.lam, self.consistency = per_class, neighbors, alignment, consistency
        if norm == "batch":
            for layer in self.model.modules():
                if isinstance(layer, nn.BatchNorm2d):
                    layer.train()
                    layer.track_running_stats = False
                    layer.running_mean = layer.running_var = None
        kinds = {"all": nn.Module, "norm": nn.BatchNorm2d, "head": nn.Linear}
        chosen = [p for m in self.model.modules() if isinstance(m, kinds[params]) for p in m.parameters(recurse=False)]
        self.optimizer = torch.optim.Adam(chosen, lr=lr)
        self.entries: list[tuple[Tensor, Tensor, int, float, int]] = []  # z, q, class, entropy, arrival
        head = self.model[-1]
        self.start = head.weight.detach().clone()
        self._insert(self.start, (self.start @ head.weight.T + head.bias).detach())

    def _insert(self, z: Tensor, p: Tensor) -> None:
        for zi, pi in zip(z, p, strict=True):
            q = torch.softmax(pi, dim=0)
            h = -sum(float(qk) * math.log(float(qk)) for qk in q if qk > 0)
            self.entries.append((zi.clone(), q.clone(), int(pi.argmax()), h, len(self.entries)))

    def kept(self) -> list[tuple[Tensor, Tensor, int, float, int]]:
        kept = []
        for k in range(len(self.start)):
            members = sorted((e for e in self.entries if e[2] == k), key=lambda e: (e[3], e[4]))
            kept += members if self.m is None else members[: self.m]
        return kept

    def __call__(self, x: Tensor) -> Tensor:
        z = self.model[:-1](x)
        p = self.model[-1](z)
        self._insert(z.detach(), p.detach())
        bank = self.kept()

        prototypes = []
        for k in range(len(self.start)):
            members = [e[0] for e in bank if e[2] == k]
            prototypes.append(sum(members) / len(members) if members else self.start[k])

        total, survivors = z.sum() * 0, 0
        for zi, pi in zip(z, p, strict=True):
            u = torch.stack([(zi / zi.norm()) @ (c / c.norm()) for c in prototypes])
            log_y = u - u.exp().sum().log()
            loss = -(torch.softmax(pi.detach(), dim=0) * log_y).sum()
            if not self.consistency or int(pi.argmax()) == int(log_y.argmax()):
                total, survivors = total + loss, survivors + 1
        loss = total / max(1, survivors)

        mslc = z.sum() * 0
        for zi, pi in zip(z, p, strict=True):
            zi = zi.detach()
            near = [(float((zi / zi.norm()) @ (e[0] / e[0].norm())), e[4], e[1]) for e in bank]
            near = sorted(near, key=lambda n: (-round(n[0], 10), -n[1]))[: self.k]  # equal: the newest
            s = torch.softmax(pi, dim=0)
            mslc = mslc + sum(a * (s - q).square().sum() for a, _, q in near) / len(near)
        if survivors or self.lam:
            loss = loss + self.lam * mslc / len(z)
            if loss.requires_grad:
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
        return p.detach()
