"""The memory bank: per class, the entries of lowest entropy; exact, bounded and written in place.

Entries live in one dense arena. A newcomer that displaces an entry takes over its row, so the arena has no holes and
its first `size` rows are the whole bank. Class sums are kept in float64 and changed by the entries that come and go, so
an insertion costs the same however much is stored.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A search holds at most this many similarities at once; queries beyond it are searched in turn.
SEARCH_LIMIT = 2**24


class Bank(nn.Module):
    """Entries (feature, probabilities, class, entropy); of each class the `per_class` of lowest entropy stay.

    `per_class=None` keeps everything. `unit` sums L2-normalised features for the prototypes instead of raw ones.
    `order` is the norm that similarities divide by: 2 for the cosine. Ties: in entropy the older entry stays; in
    similarity the newest wins, so that an entry just inserted is its own nearest.
    """

    features: Tensor
    probs: Tensor
    labels: Tensor
    entropy: Tensor
    scale: Tensor
    weight: Tensor
    arrival: Tensor
    counts: Tensor
    sums: Tensor
    peak: Tensor
    table: Tensor
    seen: Tensor

    def __init__(
        self, classes: int, dim: int, per_class: int | None, like: Tensor, *, unit: bool = False, order: int = 2
    ) -> None:
        super().__init__()
        self.per_class, self.unit, self.order = per_class, unit, order
        dtype = torch.promote_types(like.dtype, torch.float32)
        exact = torch.float32 if like.device.type == "mps" else torch.float64  # that device has no float64

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=like.device)

        # The arena: one row per entry, the first `size` of them in use.
        self.register_buffer("features", zeros(0, dim))
        self.register_buffer("probs", zeros(0, classes))
        self.register_buffer("labels", zeros(0, dtype=torch.int64))
        self.register_buffer("entropy", zeros(0))
        self.register_buffer("scale", zeros(0))  # 1 / norm, for similarities
        self.register_buffer("weight", zeros(0))  # 1 / L2 norm, for sums of unit features
        self.register_buffer("arrival", zeros(0, dtype=torch.int64))
        # One row per class. The table holds row numbers by (entropy, arrival), then -1; no filter, no table.
        self.register_buffer("counts", zeros(classes, dtype=torch.int64))
        self.register_buffer("sums", zeros(classes, dim, dtype=exact))
        self.register_buffer("peak", zeros(classes))  # the longest feature in the sum since it was last summed anew
        self.register_buffer("table", zeros(classes, 0, dtype=torch.int64))
        self.register_buffer("seen", zeros(1, dtype=torch.int64))

    @property
    def size(self) -> int:
        """How many entries are stored."""
        return int(self.counts.sum())

    def verify(self) -> None:
        """Refuse contents, such as a file's, that no entries can have left: they would be used out of place."""
        rows, classes = len(self.features), len(self.sums)
        arena = (self.probs, self.labels, self.entropy, self.scale, self.weight, self.arrival)
        fits = all(len(t) == rows for t in arena)
        fits &= all(len(t) == classes for t in (self.counts, self.peak, self.table)) and len(self.seen) == 1
        fits &= self.features.shape[1] == self.sums.shape[1] and self.probs.shape[1] == classes
        fits = fits and bool((self.counts >= 0).all()) and self.size <= rows
        if fits:
            labels = self.labels[: self.size]
            fits = bool(((labels >= 0) & (labels < classes)).all() and ((self.table >= -1) & (self.table < rows)).all())
            fits = fits and torch.equal(labels.bincount(minlength=classes), self.counts)
        if not fits:
            raise ValueError("the bank's rows do not belong together")

    @torch.no_grad()
    def insert(self, features: Tensor, probs: Tensor, labels: Tensor, entropy: Tensor) -> None:
        """Offer a batch of entries; those of lowest entropy stay."""
        if len(labels) == 0:
            return
        arrival = self.seen + torch.arange(len(labels), device=labels.device)
        self.seen += len(labels)
        size, entropy = self.size, entropy.to(self.entropy.dtype)
        if self.per_class is None:
            chosen, freed, slots = torch.arange(len(labels), device=labels.device), labels[:0], None
        else:
            chosen, freed, slots = self._compete(labels, entropy, self.per_class)
        rows = torch.cat((freed, torch.arange(size, size + len(chosen) - len(freed), device=labels.device)))
        if slots is not None:
            self.table[labels[chosen], slots] = rows

        self._reserve(size + len(chosen) - len(freed))
        left = self.labels[freed]
        self._count(freed, sign=-1)
        feature = features[chosen].to(self.features.dtype)
        self.features[rows] = feature
        self.probs[rows] = probs[chosen].to(self.probs.dtype)
        self.labels[rows] = labels[chosen]
        self.entropy[rows] = entropy[chosen]
        self.arrival[rows] = arrival[chosen]
        self.scale[rows] = 1 / feature.norm(p=self.order, dim=1).clamp(min=1e-12)
        self.weight[rows] = 1 / feature.norm(p=2, dim=1).clamp(min=1e-12)
        self._count(rows, sign=1)
        self.peak.scatter_reduce_(0, labels[chosen], 1 / self.weight[rows], "amax")
        self._refresh(left)

    def _compete(self, labels: Tensor, entropy: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rank newcomers with what their classes hold: (newcomers that stay, rows that leave, table columns)."""
        # By (class, entropy, arrival): the last sort is the first key, and stable sorts keep the older in front.
        order = entropy.argsort(stable=True)
        order = order[labels[order].argsort(stable=True)]
        classes, group, new = labels[order].unique_consecutive(return_inverse=True, return_counts=True)
        rank = torch.arange(len(order), device=order.device) - (new.cumsum(dim=0) - new)[group]

        need = min(limit, int((self.counts[classes] + new).max()))
        if need > self.table.shape[1]:
            width = min(limit, max(need, 2 * self.table.shape[1]))
            self.table = F.pad(self.table, (0, width - self.table.shape[1]), value=-1)
        stored, width = self.table[classes], self.table.shape[1]

        # Stored entries first, in their order, then newcomers in theirs: a stable sort lets the older win a tie.
        candidates = entropy.new_full((len(classes), width + int(new.max())), torch.inf)
        held = stored >= 0
        candidates[:, :width][held] = self.entropy[stored[held]]
        candidates[group, width + rank] = entropy[order]
        ranking = candidates.argsort(dim=1, stable=True)[:, :width]
        keeps = torch.zeros_like(candidates, dtype=torch.bool).scatter_(1, ranking, True)

        place = torch.empty_like(candidates, dtype=torch.int64)
        place.scatter_(1, ranking, torch.arange(width, device=order.device).expand_as(ranking))
        stays, leaves = keeps[group, width + rank], held & ~keeps[:, :width]
        padded = F.pad(stored, (0, candidates.shape[1] - width), value=-1)
        self.table[classes] = padded.gather(1, ranking)  # the newcomers' own columns are filled by the caller
        return order[stays], stored[leaves], place[group, width + rank][stays]

    def _reserve(self, rows: int) -> None:
        """Make room for so many rows: double, but never beyond a full bank."""
        have = len(self.labels)
        if rows <= have:
            return
        capacity = max(rows, 2 * have)
        if self.per_class is not None:
            capacity = min(capacity, len(self.counts) * self.per_class)
        for name in ("features", "probs", "labels", "entropy", "scale", "weight", "arrival"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros((capacity, *old.shape[1:]))
            new[:have] = old
            setattr(self, name, new)

    def _count(self, rows: Tensor, sign: int) -> None:
        """Let rows enter (+1) or leave (-1) the sums and counts of their classes."""
        labels = self.labels[rows]
        self.counts.index_add_(0, labels, torch.full_like(labels, sign))
        share = self.features[rows]
        if self.unit:
            share = share * self.weight[rows].unsqueeze(1)
        self.sums.index_add_(0, labels, share.to(self.sums.dtype), alpha=sign)

    def _refresh(self, labels: Tensor) -> None:
        """Sum anew where so long a feature was in the sum that rounding at that time shows in what remains."""
        if self.unit or not len(labels):
            return
        wild = self.peak[labels] > 1e6 * self.sums[labels].norm(dim=1)
        for k in labels[wild].unique().tolist():
            rows = self.table[k][self.table[k] >= 0]
            self.sums[k] = self.features[rows].to(self.sums.dtype).sum(dim=0)
            self.peak[k] = (1 / self.weight[rows]).amax()

    def prototypes(self) -> Tensor:
        """The mean of each class's features (C, D); zero where a class has none."""
        return self.sums.to(self.features.dtype, copy=True).div_(self.counts.clamp(min=1).unsqueeze(1))

    @torch.no_grad()
    def neighbors(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k most similar entries of each query: (similarities, probabilities), (N, k) and (N, k, C)."""
        size = self.size
        k = min(k, size)
        queries = F.normalize(queries.to(self.features.dtype), p=self.order, dim=1, eps=1e-12)
        found = [self._search(part, k, size) for part in queries.split(max(1, SEARCH_LIMIT // size))]
        similarity, rows = (torch.cat(part) for part in zip(*found, strict=True))
        return similarity, self.probs[rows]

    def _search(self, queries: Tensor, k: int, size: int) -> tuple[Tensor, Tensor]:
        similarity = (queries @ self.features[:size].T).mul_(self.scale[:size])
        top = similarity.topk(min(k + 1, size), dim=1)
        values, rows = top.values[:, :k], top.indices[:, :k]
        if k < size:
            # Products with copies of a feature differ by rounding, which goes with the lengths (1 for the cosine).
            # Where the choice ends among such equals, the newest win.
            last = rows[:, -1]
            lengths = queries.norm(p=2, dim=1) * self.scale[last] / self.weight[last]
            slack = 8 * torch.finfo(similarity.dtype).eps * lengths
            tied = (values[:, -1] - top.values[:, k] <= slack).nonzero().squeeze(1)
            among, edge, slack = similarity[tied], values[tied, -1:], slack[tied].unsqueeze(1)
            age = torch.where(among >= edge - slack, self.arrival[:size], -1)
            age[among > edge + slack] = torch.iinfo(age.dtype).max
            rows[tied] = age.topk(k, dim=1).indices
            values[tied] = among.gather(1, rows[tied])
        return values, rows
