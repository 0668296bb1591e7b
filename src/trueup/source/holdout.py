"""The split of a source domain into training and held-out images."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from trueup.data.domains import Domain
from trueup.data.slices import SliceDomain


def split_holdout(domain: Domain, holdout: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return indices to train on and indices held out: a share of every class, by the domain's name and the seed.

    With masks it is a share of the patients, with all slices of each.
    """
    rng = np.random.default_rng([seed, zlib.crc32(domain.name.encode())])
    if isinstance(domain, SliceDomain):
        patients = rng.permutation(np.unique(domain.labels))
        # At least one patient trains; at least one is held out, unless holdout is 0.
        cut = min(max(round(holdout * len(patients)), int(holdout > 0)), len(patients) - 1)
        away = np.isin(domain.labels, patients[:cut])
        return np.flatnonzero(~away), np.flatnonzero(away)
    train, held = [], []
    for label in np.unique(domain.labels):
        members = rng.permutation(np.flatnonzero(domain.labels == label))
        # At least one image of each class trains; rounding is to the nearest.
        cut = min(round(holdout * len(members)), len(members) - 1)
        held.append(members[:cut])
        train.append(members[cut:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(held))
