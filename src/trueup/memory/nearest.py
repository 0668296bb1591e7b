"""Which entries of a bank are nearest to some queries: by all products, part by part, or among those of best sketches.

A sketch is a feature's image under a fixed random projection to a quarter of its length, around a centre. Products
of sketches stray from those of features by about |a - centre| |b - centre| / sqrt(length of a sketch), so the nearest
are most likely among the first few hundred; these candidates are compared exactly. Nothing is trained, and a newcomer
costs one small product.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor

from trueup import devices

LIMIT = 2**24  # similarities that a search holds at once: it walks over the bank in parts that are as large
CANDIDATES = 200  # entries that are compared exactly for each query
SHORTER, SHORTEST = 4, 256  # a sketch has a quarter of a feature's length, but not less than this
FEWEST = 100 * CANDIDATES  # rows from which on sketches pay: to gather a candidate costs as much as tens of products
CACHE = 2**19  # features' values that a CPU gathers at once: larger buffers are got from the system each time


def projection(dim: int, like: Tensor) -> Tensor:
    """Random signs (dim, length of a sketch), the same in every process."""
    length = max(dim // SHORTER, SHORTEST)
    signs = torch.randint(2, (dim, length), generator=torch.Generator().manual_seed(0))
    scaled: Tensor = (2 * signs - 1) / length**0.5
    return scaled.to(like)


def sketched(values: Tensor, centre: Tensor, projection: Tensor) -> Tensor:
    """Sketches of normed features, by <a, b> = <a - c, b - c> + <c, b - c> + <a, c> with the centre c.

    The first product is that of projections, the second is one more value of a sketch, the last is the same for all b.
    """
    away = values - centre
    return torch.cat([away @ projection, (away @ centre).unsqueeze(1)], dim=1)


@dataclass(frozen=True)
class SearchIndex:
    """What is searched. Similarities are products with features times `scale`; of equals the newest are nearest."""

    features: Tensor
    scale: Tensor
    weight: Tensor  # 1 / L2 norm of each feature
    arrival: Tensor
    used: Tensor  # how many rows are in use
    least: int  # so many are for sure,
    most: int  # and no more than these
    sketches: Tensor | None = None
    centre: Tensor | None = None
    projection: Tensor | None = None


def nearest(shelf: SearchIndex, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most similar rows of each query: (similarities, rows)."""
    k = min(k, shelf.most)
    found = [_nearest(shelf, part, k) for part in queries.split(max(1, isqrt(LIMIT)))]
    similarity, rows = (torch.cat(part) for part in zip(*found, strict=True))
    return similarity, rows


def _nearest(shelf: SearchIndex, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if shelf.sketches is None or shelf.projection is None or shelf.centre is None:
        return _first(shelf, queries, queries, shelf.features, shelf.scale, k)
    asked = sketched(queries, shelf.centre, shelf.projection)
    asked[:, -1] = 1
    rows = _first(shelf, queries, asked, shelf.sketches, None, min(candidates(k), shelf.most))[1]
    similarity = _compared(shelf, queries, rows)
    edge = similarity.topk(k, dim=1)
    slack = _slack(shelf, queries, rows.gather(1, edge.indices[:, -1:]))
    at = _ages(similarity, shelf.arrival[rows], edge.values[:, -1:], slack).topk(k, dim=1).indices
    return similarity.gather(1, at), rows.gather(1, at)


def _first(
    shelf: SearchIndex, queries: Tensor, asked: Tensor, entries: Tensor, scale: Tensor | None, k: int
) -> tuple[Tensor, Tensor]:
    """The k rows of largest products: of queries with features, or of what is asked of sketches with these."""
    size, part = shelf.most, max(1, LIMIT // max(1, len(queries)))
    whole = list(_walk(shelf, asked, entries, scale, part)) if size <= part else []
    best: list[Tensor] = []
    for start, similarity in whole or _walk(shelf, asked, entries, scale, part):
        top = similarity.topk(min(k + 1, similarity.shape[1]), dim=1)
        best = _best(best, [top.values, top.indices + start], k + 1)
        del similarity  # or two parts are held
    values, rows = best
    if k == size:
        return values, rows
    # Where the choice ends among equals, the newest win.
    edge, slack = values[:, k - 1 : k], _slack(shelf, queries, rows[:, k - 1 : k])
    tied = edge - values[:, k : k + 1] <= slack
    values, rows = values[:, :k], rows[:, :k]
    if whole and devices.waits(queries):
        newest = _newest(shelf, whole, edge, slack, k)
        return torch.where(tied, newest[0], values), torch.where(tied, newest[1], rows)
    at = tied.nonzero()[:, 0]  # of several parts none was kept: to wait is cheaper than to compare all again
    if len(at):
        again = [(0, whole[0][1][at])] if whole else _walk(shelf, asked[at], entries, scale, part)
        values[at], rows[at] = _newest(shelf, again, edge[at], slack[at], k)
    return values, rows


def candidates(k: int) -> int:
    """How many entries are compared exactly to find k neighbours."""
    return max(CANDIDATES, 16 * k)


def _compared(shelf: SearchIndex, queries: Tensor, rows: Tensor) -> Tensor:
    """The similarities of each query with rows of its own (N, R); those not in use are at the end of all."""
    each = rows.shape[1] * queries.shape[1]
    some = max(1, (LIMIT if devices.waits(queries) else CACHE) // max(1, each))
    room = shelf.features.new_empty(some * rows.shape[1], queries.shape[1])  # the same memory again and again
    similarity = queries.new_empty(rows.shape)
    for i in range(0, len(rows), some):
        at = rows[i : i + some]
        near = torch.index_select(shelf.features, 0, at.flatten(), out=room[: at.numel()])
        near = near.to(queries.dtype).view(*at.shape, -1)
        similarity[i : i + some] = torch.bmm(near, queries[i : i + some].unsqueeze(2)).squeeze(2)
    similarity.mul_(shelf.scale[rows])
    return similarity if shelf.least >= shelf.most else similarity.masked_fill_(rows >= shelf.used, -torch.inf)


def _slack(shelf: SearchIndex, queries: Tensor, rows: Tensor) -> Tensor:
    """How far products with copies of a feature may differ by rounding, which goes with the lengths (cosine: 1)."""
    lengths = queries.norm(p=2, dim=1, keepdim=True) * shelf.scale[rows] / shelf.weight[rows]
    slack: Tensor = 8 * torch.finfo(queries.dtype).eps * lengths
    return slack


def _ages(similarity: Tensor, arrival: Tensor, edge: Tensor, slack: Tensor) -> Tensor:
    """By which to choose: what is beyond the edge comes first, then its equals, the newest of them; others are -1."""
    age = torch.where(similarity >= edge - slack, arrival, -1)
    return age.masked_fill_(similarity > edge + slack, torch.iinfo(age.dtype).max)


def _newest(
    shelf: SearchIndex, parts: Iterable[tuple[int, Tensor]], edge: Tensor, slack: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """All beyond the edge, then the newest of its equals: (similarities, rows)."""
    best: list[Tensor] = []
    for start, similarity in parts:
        age = _ages(similarity, shelf.arrival[start : start + similarity.shape[1]], edge, slack)
        top = age.topk(min(k, age.shape[1]), dim=1)
        best = _best(best, [top.values, similarity.gather(1, top.indices), top.indices + start], k)
        del similarity, age
    return best[1], best[2]


def _walk(
    shelf: SearchIndex, queries: Tensor, entries: Tensor, scale: Tensor | None, part: int
) -> Iterator[tuple[int, Tensor]]:
    """The similarities with the rows that may be in use, part by part: (first row of the part, similarities)."""
    rows = part if queries.dtype == entries.dtype else max(1, LIMIT // queries.shape[1])
    for start in range(0, max(1, shelf.most), part):
        stop = min(start + part, shelf.most)
        some = entries[start:stop]
        similarity = queries.new_empty(len(queries), len(some))
        for i in range(0, len(some), rows):  # of half precision so many are converted at once
            torch.mm(queries, some[i : i + rows].to(queries.dtype).T, out=similarity[:, i : i + rows])
        if scale is not None:
            similarity.mul_(scale[start:stop])
        sure = max(start, shelf.least)
        if sure < stop:  # rows that may not be in use
            unused = torch.arange(sure, stop, device=queries.device) >= shelf.used
            similarity[:, sure - start :].masked_fill_(unused, -torch.inf)
        yield start, similarity
        del similarity


def _best(kept: list[Tensor], new: list[Tensor], k: int) -> list[Tensor]:
    """What belongs to the k largest values of the first, of what was kept and what is new."""
    if not kept:
        return new
    both = [torch.cat(pair, dim=1) for pair in zip(kept, new, strict=True)]
    at = both[0].topk(min(k, both[0].shape[1]), dim=1).indices
    return [each.gather(1, at) for each in both]
