"""The memory bank: the entries of lowest entropy of each class; exact, bounded and updated in place.

Entries are rows of dense buffers. A new entry that displaces another takes over its row, so the first `size` rows are
the whole bank. Class sums are kept in float64 and updated by the entries that come and go, so the cost of an insertion
does not depend on how much is stored. On a device other than the CPU, code uses bounds of the size and shapes that do
not depend on values, so that the host need not wait; it reads the size only if the buffers may have to grow.
"""

from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup import losses
from trueup.memory import nearest

MAX_SUMMED = 2**24  # values that are gathered at once when class sums are recomputed
ROW_BUFFERS = ("features", "probs", "labels", "entropy", "scale", "weight", "arrival")
BATCHES_AHEAD = 16  # batches to reserve rows for if the host should not read the size each time


class Bounds(NamedTuple):
    """Bounds of the class counts that the host knows, valid while `counts` is unchanged."""

    counts: Tensor
    version: int
    min_size: int
    max_size: int
    max_count: int  # of the largest class


class Update(NamedTuple):
    """Rows that a batch changes. With masks, lengths are fixed, and dropped entries repeat the first kept one."""

    kept: Tensor  # new entries that are kept, by position in the batch
    rows: Tensor  # their rows
    freed: Tensor  # rows of entries that are removed
    classes: Tensor  # classes that lose entries
    kept_mask: Tensor | None = None
    freed_mask: Tensor | None = None
    classes_mask: Tensor | None = None


class Journal(list[tuple[Tensor, Any, Tensor]]):
    """Overwritten rows in order: (tensor, rows, old values)."""

    @torch.no_grad()
    def undo(self) -> None:
        """Restore all old values, the newest first; call again if interrupted."""
        for tensor, rows, values in reversed(self):
            tensor[rows] = values
        self.clear()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy as an empty journal: a copy has nothing to undo."""
        return Journal, ()


class Journaled(nn.Module):
    """A module with large buffers that are overwritten row by row.

    Before it overwrites rows of a buffer in `large`, it calls `record`. A buffer may also be replaced by a new tensor.
    """

    large: ClassVar[tuple[str, ...]] = ()
    journal: Journal | None = None
    """Set for the duration of a batch that may have to be undone."""

    def record(self, tensor: Tensor, rows: Any) -> None:
        """Record rows of a tensor before they are overwritten, if there is a journal."""
        if self.journal is not None:
            self.journal.append((tensor, rows, tensor[rows].clone()))


class Bank(Journaled):
    """Entries (feature, probabilities, class, entropy): the `per_class` of lowest entropy of each class.

    per_class: None keeps everything. unit: sum L2-normalised features for the prototypes instead of raw ones.
    order: the norm that similarities divide by, 2 for the cosine. half: store features and probabilities in float16,
    with features clamped to its range. sketch: store sketches of long features to search a large bank (`nearest.py`).
    Ties: the older entry is kept at equal entropy; the newest, as an entry just inserted, is nearest.
    """

    large = (*ROW_BUFFERS, "sketches", "centre", "projection")

    def __init__(
        self, classes: int, dim: int, per_class: int | None, like: Tensor, *, unit: bool = False, order: int = 2,
        half: bool = False, sketch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.per_class, self.unit, self.order = per_class, unit, order
        self.sketch = sketch = sketch and dim > nearest.MIN_SKETCH
        dtype = torch.promote_types(like.dtype, torch.float32)
        exact = torch.float32 if like.device.type == "mps" else torch.float64  # MPS has no float64
        # Not bfloat16: it has 8 bits of precision instead of 11, and only huge features need its range.
        stored = torch.float16 if half else dtype
        zeros = partial(torch.zeros, dtype=dtype, device=like.device)
        # One row per entry, the first `size` of them in use.
        self.features = nn.Buffer(zeros(0, dim, dtype=stored))
        self.probs = nn.Buffer(zeros(0, classes, dtype=stored))
        self.labels = nn.Buffer(zeros(0, dtype=torch.int64))
        self.entropy = nn.Buffer(zeros(0))
        self.scale = nn.Buffer(zeros(0))  # 1 / norm, for similarities
        self.weight = nn.Buffer(zeros(0))  # 1 / L2 norm, for sums of unit features
        self.arrival = nn.Buffer(zeros(0, dtype=torch.int64))
        if sketch:  # empty until the bank is large: `_init_sketches`
            self.projection = nn.Buffer(nearest.make_projection(dim, self.scale))
            self.centre: Tensor = nn.Buffer(zeros(dim))
            self.sketches: Tensor = nn.Buffer(zeros(0, self.projection.shape[1] + 1, dtype=stored))
        # One row per class. The table holds rows sorted by (entropy, arrival), then -1; it is empty without a filter.
        self.counts = nn.Buffer(zeros(classes, dtype=torch.int64))
        self.sums = nn.Buffer(zeros(classes, dim, dtype=exact))
        self.peak = nn.Buffer(zeros(classes))  # norm of the longest feature since the sum was recomputed
        self.table: Tensor = nn.Buffer(zeros(classes, 0, dtype=torch.int64))
        self.seen: Tensor = nn.Buffer(zeros(1, dtype=torch.int64))
        self._capacity = 2**63 - 1 if per_class is None else classes * per_class
        self._bounds = Bounds(self.counts, -1, 0, 0, 0)  # invalid: version -1 never matches

    @property
    def size(self) -> int:
        """Number of entries."""
        size = int(self.counts.sum())
        self._bounds = Bounds(self.counts, _version(self.counts), size, size, size)
        return size

    def verify(self) -> None:
        """Refuse inconsistent contents, as from a damaged file."""
        rows, classes = len(self.features), len(self.sums)
        fits = all(len(getattr(self, name)) == rows for name in ROW_BUFFERS)
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
            raise ValueError("the bank's rows do not fit together")

    def _max_size(self, min_size: int = 0) -> int:
        """Return an upper bound of the size, without a sync if at least `min_size` entries are known to be stored."""
        known = self._bounds
        valid = known.counts is self.counts and known.version == _version(self.counts)
        return known.max_size if valid and known.min_size >= min_size and not self.counts.is_cpu else self.size

    @torch.no_grad()
    def insert(self, features: Tensor, probs: Tensor, labels: Tensor, entropy: Tensor) -> None:
        """Offer a batch of entries; those of lowest entropy are kept."""
        if (n := len(labels)) == 0:
            return
        index = torch.arange(n, device=labels.device)
        arrival, entropy = self.seen + index, entropy.to(self.entropy.dtype)
        self.seen += n
        if self.per_class is None:
            rows = self._max_size() + index
            self._reserve(self._bounds.max_size + n)
            update = Update(index, rows, rows[:0], rows[:0])
        else:
            update = self._rank(labels, entropy, self.per_class)
        self._add_to_sums(update.freed, -1, update.freed_mask)
        self._write(update, features, probs=probs, labels=labels, entropy=entropy, arrival=arrival)
        self._add_to_sums(update.rows, 1, update.kept_mask)
        self._recompute_sums(update.classes, update.classes_mask)
        if self.sketch and not len(self.sketches) and len(self.labels) >= nearest.MIN_ROWS:
            self._init_sketches()
        _, _, low, high, count = self._bounds
        self._bounds = Bounds(self.counts, _version(self.counts), low, min(high + n, self._capacity), count + n)

    def insert_predicted(self, features: Tensor, scores: Tensor) -> None:
        """Offer features under their predicted classes."""
        scores = scores.detach().to(self.scale.dtype)
        self.insert(features.detach(), F.softmax(scores, dim=1), scores.argmax(dim=1), losses.entropy(scores))

    def _rank(self, labels: Tensor, entropy: Tensor, limit: int) -> Update:
        """Rank new entries among those of their classes; decide which are kept, and in which rows."""
        if labels.is_cpu:
            self._reserve(1)
        elif min(self._max_size() + len(labels), self._capacity) > len(self.labels):
            self._reserve(self.size + BATCHES_AHEAD * len(labels))
        # Sort by (class, entropy, arrival): stable sorts, the first key last.
        order = entropy.argsort(stable=True)
        order = order[labels[order].argsort(stable=True)]
        labels, entropy = labels[order], entropy[order]
        rank = torch.arange(len(order), device=order.device) - torch.searchsorted(labels, labels)
        width = self._widen_table(rank, limit)
        classes = torch.arange(len(self.counts), device=order.device)
        if len(order) < len(classes):  # only as many classes as a batch can have, its own among them
            present = self.peak.new_zeros(len(classes)).index_fill_(0, labels, 1)
            classes = present.topk(len(order), dim=0, sorted=False).indices.sort().values
        group = torch.searchsorted(classes, labels)
        # Stored entries come before new ones of the same entropy, and before those of entropy NaN.
        stored = self.table.index_select(0, classes)
        levels = torch.where(stored >= 0, self.entropy[stored], torch.inf).index_select(0, group)
        before = torch.searchsorted(levels, entropy.unsqueeze(1), right=True).squeeze(1)
        inserted = stored.new_zeros(len(classes), width + 1)
        inserted.view(-1).index_add_(0, group * (width + 1) + before, torch.ones_like(before))
        shifted = inserted.cumsum(dim=1)[:, :width] + torch.arange(width, device=order.device)
        return self._assign_rows(order, classes, stored, shifted, group, rank + before)

    def _assign_rows(
        self, order: Tensor, classes: Tensor, stored: Tensor, shifted: Tensor, group: Tensor, rank: Tensor
    ) -> Update:
        """Give rows to new entries that rank within the table; stored entries shift in it or are removed."""
        n, width = len(order), stored.shape[1]
        kept, removed = rank < width, (stored >= 0) & (shifted >= width)
        # Freed rows are used first, then those after the last in use.
        turn, nth = kept.cumsum(dim=0) - 1, removed.view(-1).cumsum(dim=0)
        freed = order.new_full((n + 1,), -1)  # the last place collects entries that are not removed
        freed = freed.scatter_(0, torch.where(removed.view(-1), nth - 1, n), stored.view(-1))[:n]
        rows = torch.where(turn < nth[-1], freed[turn], self.counts.sum() + turn - nth[-1])
        table = F.pad(stored, (0, 1)).scatter_(1, shifted.clamp(max=width), stored)  # last column: entries that lose
        table[group, rank.clamp(max=width)] = rows
        self.table[classes] = table[:, :width]
        if order.is_cpu:
            at, freed = kept.nonzero().squeeze(1), freed[: int(nth[-1])]
            self._reserve(self.size + len(at) - len(freed))
            return Update(order[at], rows[at], freed, classes[removed.any(dim=1)])
        first = kept.to(torch.int64).argmax(dim=0, keepdim=True)
        order, rows = torch.where(kept, order, order[first]), torch.where(kept, rows, rows[first]).clamp(min=0)
        return Update(order, rows, freed.clamp(min=0), classes, kept, freed >= 0, removed.any(dim=1))

    def _widen_table(self, rank: Tensor, limit: int) -> int:
        """Widen the table for the largest class that these entries may make; return its width."""
        have, on_cpu = self.table.shape[1], rank.is_cpu
        if have < limit and (on_cpu or self._bounds.max_count + len(rank) > have):
            self._bounds = self._bounds._replace(max_count=int(self.counts.max()))
            need = self._bounds.max_count + (int(rank.max()) + 1 if on_cpu else BATCHES_AHEAD * len(rank))
            if need > have:
                self.table = F.pad(self.table, (0, min(limit, max(need, 2 * have)) - have), value=-1)
        return self.table.shape[1]

    def _reserve(self, rows: int) -> None:
        """Grow the buffers to at least `rows` rows: at least double, but never beyond a full bank."""
        have = len(self.labels)
        if rows <= have:
            return
        capacity = min(max(rows, 2 * have), self._capacity)
        for name in (*ROW_BUFFERS, "sketches") if self.sketch and len(self.sketches) else ROW_BUFFERS:
            old: Tensor = getattr(self, name)
            setattr(self, name, F.pad(old, [0, 0] * (old.ndim - 1) + [0, capacity - have]))

    def _init_sketches(self) -> None:
        """Sketch all stored features around their mean; later ones are sketched as they come."""
        step = max(1, MAX_SUMMED // len(self.centre))
        parts = list(zip(self.features.split(step), self.scale.split(step), strict=True))
        # Unused rows have a scale of 0.
        total = torch.stack([scale @ part.to(scale.dtype) for part, scale in parts]).sum(dim=0)
        self.centre = total / self.counts.sum()
        self.sketches = torch.cat([self._make_sketches(part * scale.unsqueeze(1)) for part, scale in parts])

    def _make_sketches(self, unit: Tensor) -> Tensor:
        return nearest.make_sketches(unit, self.centre, self.projection).to(self.sketches.dtype)

    def _write(self, update: Update, features: Tensor, **entries: Tensor) -> None:
        """Write the kept entries into their rows."""
        feature = features.index_select(0, update.kept).to(self.scale.dtype)
        if self.features.dtype == torch.float16:
            feature = feature.clamp(-65504, 65504).to(torch.float16).to(self.scale.dtype)
        length = feature.norm(p=2, dim=1)
        norm = length if self.order == 2 else feature.norm(p=self.order, dim=1)
        values = {name: given.index_select(0, update.kept) for name, given in entries.items()}
        values |= {"features": feature, "scale": 1 / norm.clamp(min=1e-12), "weight": 1 / length.clamp(min=1e-12)}
        if self.sketch and len(self.sketches):
            values["sketches"] = self._make_sketches(feature * values["scale"].unsqueeze(1))
        any_kept = None if update.kept_mask is None else update.kept_mask.any()
        for name, value in values.items():
            buffer: Tensor = getattr(self, name)
            value = value.to(buffer.dtype)
            self.record(buffer, update.rows)
            buffer[update.rows] = value if any_kept is None else torch.where(any_kept, value, buffer[update.rows])

    def _add_to_sums(self, rows: Tensor, sign: int, mask: Tensor | None) -> None:
        """Add rows to (+1) or subtract them from (-1) the sums and counts of their classes."""
        if not len(rows):
            return
        labels, weight = self.labels[rows], self.weight[rows]
        feature = self.features.index_select(0, rows).to(weight.dtype)
        feature = feature * weight.unsqueeze(1) if self.unit else feature
        ones, lengths = torch.full_like(labels, sign), 1 / weight
        if mask is not None:
            ones, feature, lengths = ones * mask, feature.where(mask.unsqueeze(1), 0), lengths.where(mask, 0)
        self.counts.index_add_(0, labels, ones)
        self.sums.index_add_(0, labels, feature.to(self.sums.dtype), alpha=sign)
        if sign > 0:
            self.peak.scatter_reduce_(0, labels, lengths, "amax")

    def _recompute_sums(self, classes: Tensor, mask: Tensor | None) -> None:
        """Recompute sums that once held a feature so long that its rounding errors show in the remaining sum."""
        if self.unit or not len(classes):
            return
        inexact = self.peak[classes] > 1e6 * self.sums.index_select(0, classes).norm(dim=1)
        inexact = inexact if mask is None else inexact & mask
        step = max(1, MAX_SUMMED // max(1, self.table.shape[1] * self.features.shape[1]))
        if mask is None or len(classes) > 4 * step:  # with more classes a sync is cheaper than needless sums
            classes, inexact = classes[inexact], inexact[inexact]
        for start in range(0, len(classes), step):
            some, chosen = classes[start : start + step], inexact[start : start + step]
            rows = self.table[some] * chosen.unsqueeze(1)  # row 0 for sums that stay
            total = self.features[rows].sum(dim=1, dtype=self.sums.dtype)
            self.sums[some] = torch.where(chosen.unsqueeze(1), total, self.sums[some])
            self.peak[some] = torch.where(chosen, (1 / self.weight[rows]).amax(dim=1), self.peak[some])

    def prototypes(self) -> Tensor:
        """Return the mean of each class's features (C, D); zero for a class without entries."""
        return self.sums.to(self.weight.dtype, copy=True).div_(self.counts.clamp(min=1).unsqueeze(1))

    @torch.no_grad()
    def neighbors(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return similarities (N, k) and probabilities (N, k, C) of the k most similar entries of each query."""
        sketched = self.sketch and len(self.sketches) > 0
        max_size = self._max_size(min_size=nearest.candidate_count(k) if sketched else k)
        index = nearest.SearchIndex(
            self.features, self.scale, self.weight, self.arrival, self.counts.sum(), self._bounds.min_size, max_size,
            *((self.sketches, self.centre, self.projection) if sketched else ()),
        )  # fmt: skip
        queries = F.normalize(queries.to(self.scale.dtype), p=self.order, dim=1, eps=1e-12)
        similarity, rows = nearest.search(index, queries, k)
        return similarity, self.probs[rows].to(self.scale.dtype)


def _version(tensor: Tensor) -> int:
    """Return torch's count of in-place writes to a tensor; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version
