"""Search for the most similar rows of a bank: exact over all rows, or among candidates with the best sketches.

A sketch is a fixed random projection of a centred feature to a quarter of its length. Products of sketches differ from
those of features by about |a - centre| |b - centre| / sqrt(length of a sketch), so the nearest rows are most likely
among the best few hundred candidates, which are compared exactly. Nothing is trained, and a new entry costs one small
matrix product.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor

MAX_SIMILARITIES = 2**24  # held at once: a search goes over the bank in chunks of this size
CANDIDATES = 200  # rows compared exactly for each query
SKETCH_RATIO, MIN_SKETCH = 4, 256  # a sketch has a quarter of a feature's length, but at least 256 values
MIN_ROWS = 100 * CANDIDATES  # below, sketches do not pay: gathering one candidate costs as much as tens of products
MAX_GATHERED = 2**19  # values that a CPU gathers at once: larger buffers are not reused by the allocator


def make_projection(dim: int, like: Tensor) -> Tensor:
    """Return random signs (dim, length of a sketch), the same in every process."""
    length = max(dim // SKETCH_RATIO, MIN_SKETCH)
    signs = torch.randint(2, (dim, length), generator=torch.Generator().manual_seed(0))
    scaled: Tensor = (2 * signs - 1) / length**0.5
    return scaled.to(like)


def make_sketches(features: Tensor, centre: Tensor, projection: Tensor) -> Tensor:
    """Sketch normalised features, by <a, b> = <a - c, b - c> + <c, b - c> + <a, c> with the centre c.

    Projections give the first product. The second is one more value of b's sketch. The last is the same for all b.
    """
    centred = features - centre
    return torch.cat([centred @ projection, (centred @ centre).unsqueeze(1)], dim=1)


@dataclass(frozen=True)
class SearchIndex:
    """Rows to search. Similarity is the product with a feature times its `scale`; ties go to the newest row."""

    features: Tensor
    scale: Tensor
    weight: Tensor  # 1 / L2 norm of each feature
    arrival: Tensor
    used: Tensor  # number of rows in use
    min_used: int  # bounds of `used` that are known without reading it
    max_used: int
    sketches: Tensor | None = None
    centre: Tensor | None = None
    projection: Tensor | None = None


def search(index: SearchIndex, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k most similar rows of each query: (similarities, rows)."""
    k = min(k, index.max_used)
    found = [_search(index, chunk, k) for chunk in queries.split(max(1, isqrt(MAX_SIMILARITIES)))]
    similarity, rows = (torch.cat(chunks) for chunks in zip(*found, strict=True))
    return similarity, rows


def _search(index: SearchIndex, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if index.sketches is None or index.projection is None or index.centre is None:
        return _top_rows(index, queries, queries, index.features, index.scale, k)
    sketches = make_sketches(queries, index.centre, index.projection)
    sketches[:, -1] = 1
    rows = _top_rows(index, queries, sketches, index.sketches, None, min(candidate_count(k), index.max_used))[1]
    similarity = _exact_similarities(index, queries, rows)
    top = similarity.topk(k, dim=1)
    tolerance = _tolerance(index, queries, rows.gather(1, top.indices[:, -1:]))
    at = _sort_keys(similarity, index.arrival[rows], top.values[:, -1:], tolerance).topk(k, dim=1).indices
    return similarity.gather(1, at), rows.gather(1, at)


def _top_rows(
    index: SearchIndex, queries: Tensor, vectors: Tensor, entries: Tensor, scale: Tensor | None, k: int
) -> tuple[Tensor, Tensor]:
    """Return the k rows with the largest products of `vectors` (queries, or their sketches) and `entries`."""
    size, chunk = index.max_used, max(1, MAX_SIMILARITIES // max(1, len(queries)))
    kept = list(_chunks(index, vectors, entries, scale, chunk)) if size <= chunk else []
    best: list[Tensor] = []
    for start, similarity in kept or _chunks(index, vectors, entries, scale, chunk):
        top = similarity.topk(min(k + 1, similarity.shape[1]), dim=1)
        best = _merge(best, [top.values, top.indices + start], k + 1)
        del similarity  # free this chunk before the next is made
    values, rows = best
    if k == size:
        return values, rows
    # If the k-th and the next are equal, the newest of all their equals win.
    cutoff, tolerance = values[:, k - 1 : k], _tolerance(index, queries, rows[:, k - 1 : k])
    tied = cutoff - values[:, k : k + 1] <= tolerance
    values, rows = values[:, :k], rows[:, :k]
    if kept and not queries.is_cpu:
        newest = _break_ties(index, kept, cutoff, tolerance, k)
        return torch.where(tied, newest[0], values), torch.where(tied, newest[1], rows)
    at = tied.nonzero()[:, 0]  # chunks were not kept: waiting for the device is cheaper than comparing all again
    if len(at):
        again = [(0, kept[0][1][at])] if kept else _chunks(index, vectors[at], entries, scale, chunk)
        values[at], rows[at] = _break_ties(index, again, cutoff[at], tolerance[at], k)
    return values, rows


def candidate_count(k: int) -> int:
    """Return how many rows are compared exactly to find k neighbours."""
    return max(CANDIDATES, 16 * k)


def _exact_similarities(index: SearchIndex, queries: Tensor, rows: Tensor) -> Tensor:
    """Return similarities of each query with its own candidates (N, R); -inf for rows not in use."""
    each = rows.shape[1] * queries.shape[1]
    step = max(1, (MAX_GATHERED if queries.is_cpu else MAX_SIMILARITIES) // max(1, each))
    buffer = index.features.new_empty(step * rows.shape[1], queries.shape[1])  # reused by all iterations
    similarity = queries.new_empty(rows.shape)
    for i in range(0, len(rows), step):
        at = rows[i : i + step]
        near = torch.index_select(index.features, 0, at.flatten(), out=buffer[: at.numel()])
        near = near.to(queries.dtype).view(*at.shape, -1)
        similarity[i : i + step] = torch.bmm(near, queries[i : i + step].unsqueeze(2)).squeeze(2)
    similarity.mul_(index.scale[rows])
    return similarity if index.min_used >= index.max_used else similarity.masked_fill_(rows >= index.used, -torch.inf)


def _tolerance(index: SearchIndex, queries: Tensor, rows: Tensor) -> Tensor:
    """Return how much rounding can make similarities with equal features differ; it grows with the norms."""
    lengths = queries.norm(p=2, dim=1, keepdim=True) * index.scale[rows] / index.weight[rows]
    tolerance: Tensor = 8 * torch.finfo(queries.dtype).eps * lengths
    return tolerance


def _sort_keys(similarity: Tensor, arrival: Tensor, cutoff: Tensor, tolerance: Tensor) -> Tensor:
    """Return keys that rank rows above the cutoff first, then ties by arrival, newest first; -1 below it."""
    keys = torch.where(similarity >= cutoff - tolerance, arrival, -1)
    return keys.masked_fill_(similarity > cutoff + tolerance, torch.iinfo(keys.dtype).max)


def _break_ties(
    index: SearchIndex, chunks: Iterable[tuple[int, Tensor]], cutoff: Tensor, tolerance: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Return all rows above the cutoff, then the newest of its ties: (similarities, rows)."""
    best: list[Tensor] = []
    for start, similarity in chunks:
        keys = _sort_keys(similarity, index.arrival[start : start + similarity.shape[1]], cutoff, tolerance)
        top = keys.topk(min(k, keys.shape[1]), dim=1)
        best = _merge(best, [top.values, similarity.gather(1, top.indices), top.indices + start], k)
        del similarity, keys
    return best[1], best[2]


def _chunks(
    index: SearchIndex, queries: Tensor, entries: Tensor, scale: Tensor | None, chunk: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield similarities with all rows that may be in use: (first row of the chunk, similarities)."""
    rows = chunk if queries.dtype == entries.dtype else max(1, MAX_SIMILARITIES // queries.shape[1])
    for start in range(0, max(1, index.max_used), chunk):
        stop = min(start + chunk, index.max_used)
        part = entries[start:stop]
        similarity = queries.new_empty(len(queries), len(part))
        for i in range(0, len(part), rows):  # converts so many rows of half precision at once
            torch.mm(queries, part[i : i + rows].to(queries.dtype).T, out=similarity[:, i : i + rows])
        if scale is not None:
            similarity.mul_(scale[start:stop])
        first = max(start, index.min_used)
        if first < stop:  # rows that may not be in use
            unused = torch.arange(first, stop, device=queries.device) >= index.used
            similarity[:, first - start :].masked_fill_(unused, -torch.inf)
        yield start, similarity
        del similarity


def _merge(kept: list[Tensor], new: list[Tensor], k: int) -> list[Tensor]:
    """Return the k columns of both lists with the largest values of their first tensors."""
    if not kept:
        return new
    both = [torch.cat(pair, dim=1) for pair in zip(kept, new, strict=True)]
    at = both[0].topk(min(k, both[0].shape[1]), dim=1).indices
    return [each.gather(1, at) for each in both]
