"""The memory bank: per class, the entries of lowest entropy; exact, bounded and written in place.

Entries live in one dense arena. A newcomer that displaces an entry takes over its row, so the arena has no holes and
its first `size` rows are the whole bank. Class sums are kept in float64 and changed by the entries that come and go, so
an insertion costs the same however much is stored. Where reading a value makes the host wait for its device, the host
goes by bounds of the size, and no shape follows from a value; it reads the size where the arena may have to grow.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup import devices
from trueup.memory import nearest as search
from trueup.memory.journal import Journaled
from trueup.memory.nearest import SearchIndex, candidates, nearest, projection, sketched

SUM_LIMIT = 2**24  # values that are gathered at once when classes are summed anew
ARENA = ("features", "probs", "labels", "entropy", "scale", "weight", "arrival")
AHEAD = 16  # batches for which there is room when the arena grows and the host will not read the size


class Known(NamedTuple):
    """What the host knows of the counts, as long as they are the same: bounds of their sum, and of the largest."""

    counts: Tensor
    writes: int
    least: int
    most: int
    deepest: int


class Change(NamedTuple):
    """What a batch changes. With masks lists have their full length; who does not stay repeats the first who does."""

    chosen: Tensor  # newcomers that stay
    rows: Tensor  # where
    freed: Tensor  # rows whose entries leave
    classes: Tensor  # those that entries leave
    stays: Tensor | None = None
    leaves: Tensor | None = None
    left: Tensor | None = None


class Bank(Journaled):
    """Entries (feature, probabilities, class, entropy); of each class the `per_class` of lowest entropy stay.

    `per_class=None` keeps everything. `unit` sums L2-normalised features for the prototypes instead of raw ones.
    `order` is the norm that similarities divide by: 2 for the cosine. `half` stores features and probabilities in
    float16, features cut to its range; all else is as precise as before. `sketch` keeps sketches of long features, by
    which a large bank is searched (`search.py`). Ties: in entropy the older entry stays; in similarity the newest wins,
    so that an entry just inserted is its own nearest.
    """

    features: Tensor
    probs: Tensor
    labels: Tensor
    entropy: Tensor
    scale: Tensor
    weight: Tensor
    arrival: Tensor
    sketches: Tensor
    centre: Tensor
    projection: Tensor
    counts: Tensor
    sums: Tensor
    peak: Tensor
    table: Tensor
    seen: Tensor
    large = (*ARENA, "sketches", "centre", "projection")

    def __init__(
        self,
        classes: int,
        dim: int,
        per_class: int | None,
        like: Tensor,
        *,
        unit: bool = False,
        order: int = 2,
        half: bool = False,
        sketch: bool = False,
    ) -> None:
        super().__init__()
        self.per_class, self.unit, self.order = per_class, unit, order
        self.sketch = sketch = sketch and dim > search.SHORTEST
        dtype = torch.promote_types(like.dtype, torch.float32)
        exact = torch.float32 if like.device.type == "mps" else torch.float64  # that device has no float64
        # Not bfloat16: its 8 bits instead of 11 are lost on all features, its range is gained for giants alone.
        stored = torch.float16 if half else dtype

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=like.device)

        # The arena: one row per entry, the first `size` of them in use.
        self.register_buffer("features", zeros(0, dim, dtype=stored))
        self.register_buffer("probs", zeros(0, classes, dtype=stored))
        self.register_buffer("labels", zeros(0, dtype=torch.int64))
        self.register_buffer("entropy", zeros(0))
        self.register_buffer("scale", zeros(0))  # 1 / norm, for similarities
        self.register_buffer("weight", zeros(0))  # 1 / L2 norm, for sums of unit features
        self.register_buffer("arrival", zeros(0, dtype=torch.int64))
        if sketch:  # none before the arena is large: `_reserve`
            self.register_buffer("projection", projection(dim, self.scale))
            self.register_buffer("centre", zeros(dim))
            self.register_buffer("sketches", zeros(0, self.projection.shape[1] + 1, dtype=stored))
        # One row per class. The table holds row numbers by (entropy, arrival), then -1; no filter, no table.
        self.register_buffer("counts", zeros(classes, dtype=torch.int64))
        self.register_buffer("sums", zeros(classes, dim, dtype=exact))
        self.register_buffer("peak", zeros(classes))  # the longest feature in the sum since it was last summed anew
        self.register_buffer("table", zeros(classes, 0, dtype=torch.int64))
        self.register_buffer("seen", zeros(1, dtype=torch.int64))
        self._full = 2**63 - 1 if per_class is None else classes * per_class  # never more entries than these
        self._known = Known(self.counts, -1, 0, 0, 0)  # nothing yet; found out anew when others change the counts

    @property
    def size(self) -> int:
        """How many entries are stored."""
        size = int(self.counts.sum())
        self._known = Known(self.counts, _writes(self.counts), size, size, size)
        return size

    def verify(self) -> None:
        """Refuse contents, such as a file's, that no entries can have left: they would be used out of place."""
        rows, classes = len(self.features), len(self.sums)
        fits = all(len(getattr(self, name)) == rows for name in ARENA)
        fits &= all(len(t) == classes for t in (self.counts, self.peak, self.table)) and len(self.seen) == 1
        fits &= self.features.shape[1] == self.sums.shape[1] and self.probs.shape[1] == classes
        if self.sketch:
            fits &= self.projection.shape == (self.features.shape[1], self.sketches.shape[1] - 1)
            fits &= len(self.sketches) in (0, rows) and len(self.centre) == len(self.projection)
        fits &= all(t.shape == self.sums.shape for name, t in self.named_buffers() if name == "start")
        fits = fits and bool((self.counts >= 0).all()) and self.size <= rows
        if fits:
            labels = self.labels[: self.size]
            fits = bool(((labels >= 0) & (labels < classes)).all() and ((self.table >= -1) & (self.table < rows)).all())
            fits = fits and torch.equal(labels.bincount(minlength=classes), self.counts)
            fits = fits and (self.per_class is None or torch.equal((self.table >= 0).sum(dim=1), self.counts))
        if not fits:
            raise ValueError("the bank's rows do not belong together")

    def _bound(self, least: int = 0) -> int:
        """How many rows may be in use: the size, unless one would wait for it and knows a bound and of `least` rows."""
        known = self._known
        same = known.counts is self.counts and known.writes == _writes(self.counts)
        return known.most if same and known.least >= least and devices.waits(self.counts) else self.size

    @torch.no_grad()
    def insert(self, features: Tensor, probs: Tensor, labels: Tensor, entropy: Tensor) -> None:
        """Offer a batch of entries; those of lowest entropy stay."""
        if (n := len(labels)) == 0:
            return
        every = torch.arange(n, device=labels.device)
        arrival, entropy = self.seen + every, entropy.to(self.entropy.dtype)
        self.seen += n
        if self.per_class is None:
            rows = self._bound() + every
            self._reserve(self._known.most + n)
            change = Change(every, rows, rows[:0], rows[:0])
        else:
            change = self._compete(labels, entropy, self.per_class)
        self._count(change.freed, -1, change.leaves)
        self._write(change, features, probs=probs, labels=labels, entropy=entropy, arrival=arrival)
        self._count(change.rows, 1, change.stays)
        self._refresh(change.classes, change.left)
        if self.sketch and not len(self.sketches) and len(self.labels) >= search.FEWEST:
            self._begin_sketches()
        _, _, least, most, deepest = self._known
        self._known = Known(self.counts, _writes(self.counts), least, min(most + n, self._full), deepest + n)

    def _compete(self, labels: Tensor, entropy: Tensor, limit: int) -> Change:
        """Rank newcomers with what their classes hold: who stays, and whose rows they take."""
        if not devices.waits(labels):
            self._reserve(1)
        elif min(self._bound() + len(labels), self._full) > len(self.labels):
            self._reserve(self.size + AHEAD * len(labels))
        # By (class, entropy, arrival): the last sort is the first key, and stable sorts keep the older in front.
        order = entropy.argsort(stable=True)
        order = order[labels[order].argsort(stable=True)]
        labels, entropy = labels[order], entropy[order]
        rank = torch.arange(len(order), device=order.device) - torch.searchsorted(labels, labels)
        width = self._widen(rank, limit)
        classes = torch.arange(len(self.counts), device=order.device)
        if len(order) < len(classes):  # as many as a batch can have, its own among them
            there = self.peak.new_zeros(len(classes)).index_fill_(0, labels, 1)
            classes = there.topk(len(order), dim=0, sorted=False).indices.sort().values
        group = torch.searchsorted(classes, labels)
        # Stored entries come before newcomers of the same entropy, and before those that are no number.
        held = self.table.index_select(0, classes)
        levels = torch.where(held >= 0, self.entropy[held], torch.inf).index_select(0, group)
        before = torch.searchsorted(levels, entropy.unsqueeze(1), right=True).squeeze(1)
        ahead = held.new_zeros(len(classes), width + 1)
        ahead.view(-1).index_add_(0, group * (width + 1) + before, torch.ones_like(before))
        moved = ahead.cumsum(dim=1)[:, :width] + torch.arange(width, device=order.device)
        return self._seat(order, classes, held, moved, group, rank + before)

    def _seat(self, order: Tensor, classes: Tensor, held: Tensor, moved: Tensor, group: Tensor, rank: Tensor) -> Change:
        """Give rows to newcomers whose rank the table holds; what it held moves up in it, or leaves."""
        n, width = len(order), held.shape[1]
        stays, leaves = rank < width, (held >= 0) & (moved >= width)
        # Rows that become free are taken in turn, then those behind the last in use.
        turn, nth = stays.cumsum(dim=0) - 1, leaves.view(-1).cumsum(dim=0)
        freed = order.new_full((n + 1,), -1)  # the last is for what does not leave
        freed = freed.scatter_(0, torch.where(leaves.view(-1), nth - 1, n), held.view(-1))[:n]
        rows = torch.where(turn < nth[-1], freed[turn], self.counts.sum() + turn - nth[-1])
        table = F.pad(held, (0, 1)).scatter_(1, moved.clamp(max=width), held)  # the last column is for who loses
        table[group, rank.clamp(max=width)] = rows
        self.table[classes] = table[:, :width]
        if not devices.waits(order):
            seated, freed = stays.nonzero().squeeze(1), freed[: int(nth[-1])]
            self._reserve(self.size + len(seated) - len(freed))
            return Change(order[seated], rows[seated], freed, classes[leaves.any(dim=1)])
        first = stays.to(torch.int64).argmax(dim=0, keepdim=True)
        order, rows = torch.where(stays, order, order[first]), torch.where(stays, rows, rows[first]).clamp(min=0)
        return Change(order, rows, freed.clamp(min=0), classes, stays, freed >= 0, leaves.any(dim=1))

    def _widen(self, rank: Tensor, limit: int) -> int:
        """Give the table the columns that the largest class may need with these newcomers; how many it has."""
        have, free = self.table.shape[1], not devices.waits(rank)
        if have < limit and (free or self._known.deepest + len(rank) > have):
            self._known = self._known._replace(deepest=int(self.counts.max()))
            need = self._known.deepest + (int(rank.max()) + 1 if free else AHEAD * len(rank))
            if need > have:
                self.table = F.pad(self.table, (0, min(limit, max(need, 2 * have)) - have), value=-1)
        return self.table.shape[1]

    def _reserve(self, rows: int) -> None:
        """Make room for so many rows: double, but never beyond a full bank."""
        have = len(self.labels)
        if rows <= have:
            return
        capacity = min(max(rows, 2 * have), self._full)
        for name in (*ARENA, "sketches") if self.sketch and len(self.sketches) else ARENA:
            old: Tensor = getattr(self, name)
            setattr(self, name, F.pad(old, [0, 0] * (old.ndim - 1) + [0, capacity - have]))

    def _begin_sketches(self) -> None:
        """Sketch what is stored, around its mean; from here on newcomers are sketched as they come."""
        step = max(1, SUM_LIMIT // len(self.centre))
        parts = list(zip(self.features.split(step), self.scale.split(step), strict=True))
        # Rows that are not in use have a scale of zero.
        total = torch.stack([scale @ part.to(scale.dtype) for part, scale in parts]).sum(dim=0)
        self.centre = total / self.counts.sum()
        self.sketches = torch.cat([self._sketched(part * scale.unsqueeze(1)) for part, scale in parts])

    def _sketched(self, unit: Tensor) -> Tensor:
        return sketched(unit, self.centre, self.projection).to(self.sketches.dtype)

    def _write(self, change: Change, features: Tensor, **entries: Tensor) -> None:
        """Put newcomers into their rows."""
        feature = features.index_select(0, change.chosen).to(self.scale.dtype)
        if self.features.dtype == torch.float16:
            feature = feature.clamp(-65504, 65504).to(torch.float16).to(self.scale.dtype)
        length = feature.norm(p=2, dim=1)
        norm = length if self.order == 2 else feature.norm(p=self.order, dim=1)
        values = {name: given.index_select(0, change.chosen) for name, given in entries.items()}
        values |= {"features": feature, "scale": 1 / norm.clamp(min=1e-12), "weight": 1 / length.clamp(min=1e-12)}
        if self.sketch and len(self.sketches):
            values["sketches"] = self._sketched(feature * values["scale"].unsqueeze(1))
        anyone = None if change.stays is None else change.stays.any()
        for name, value in values.items():
            arena: Tensor = getattr(self, name)
            value = value.to(arena.dtype)  # if nobody stays, a row gets what it has
            self.note(arena, change.rows)
            arena[change.rows] = value if anyone is None else torch.where(anyone, value, arena[change.rows])

    def _count(self, rows: Tensor, sign: int, really: Tensor | None) -> None:
        """Let rows enter (+1) or leave (-1) the sums and counts of their classes."""
        if not len(rows):
            return
        labels, weight = self.labels[rows], self.weight[rows]
        share = self.features.index_select(0, rows).to(weight.dtype)
        share = share * weight.unsqueeze(1) if self.unit else share
        ones, lengths = torch.full_like(labels, sign), 1 / weight
        if really is not None:
            ones, share, lengths = ones * really, share.where(really.unsqueeze(1), 0), lengths.where(really, 0)
        self.counts.index_add_(0, labels, ones)
        self.sums.index_add_(0, labels, share.to(self.sums.dtype), alpha=sign)
        if sign > 0:
            self.peak.scatter_reduce_(0, labels, lengths, "amax")

    def _refresh(self, classes: Tensor, left: Tensor | None) -> None:
        """Sum anew where so long a feature was in the sum that rounding at that time shows in what remains."""
        if self.unit or not len(classes):
            return
        wild = self.peak[classes] > 1e6 * self.sums.index_select(0, classes).norm(dim=1)
        wild = wild if left is None else wild & left
        at_once = max(1, SUM_LIMIT // max(1, self.table.shape[1] * self.features.shape[1]))
        if left is None or len(classes) > 4 * at_once:  # from there on it is dearer to sum in vain than to wait
            classes, wild = classes[wild], wild[wild]
        for start in range(0, len(classes), at_once):
            some, sure = classes[start : start + at_once], wild[start : start + at_once]
            rows = self.table[some] * sure.unsqueeze(1)  # row 0 in place of rows that need not be read
            fresh = self.features[rows].sum(dim=1, dtype=self.sums.dtype)
            self.sums[some] = torch.where(sure.unsqueeze(1), fresh, self.sums[some])
            self.peak[some] = torch.where(sure, (1 / self.weight[rows]).amax(dim=1), self.peak[some])

    def prototypes(self) -> Tensor:
        """The mean of each class's features (C, D); zero where a class has none."""
        return self.sums.to(self.weight.dtype, copy=True).div_(self.counts.clamp(min=1).unsqueeze(1))

    @torch.no_grad()
    def neighbors(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k most similar entries of each query: (similarities, probabilities), (N, k) and (N, k, C)."""
        begun = self.sketch and len(self.sketches) > 0
        most = self._bound(least=candidates(k) if begun else k)
        shelf = SearchIndex(
            self.features, self.scale, self.weight, self.arrival, self.counts.sum(), self._known.least, most,
            *((self.sketches, self.centre, self.projection) if begun else ()),
        )  # fmt: skip
        queries = F.normalize(queries.to(self.scale.dtype), p=self.order, dim=1, eps=1e-12)
        similarity, rows = nearest(shelf, queries, k)
        return similarity, self.probs[rows].to(self.scale.dtype)


def _writes(tensor: Tensor) -> int:
    """How often a tensor was written to in place; tensors of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version
