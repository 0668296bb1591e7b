import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from byhand import PROBS, X, identity_head
from torch import Tensor

import trueup
from trueup.methods.lame import Lame, energy_of, propagate
from trueup.testing import convnet, images

G = torch.Generator().manual_seed(0)
FEATURES = F.normalize(torch.randn(12, 5, generator=G, dtype=torch.float64), dim=1)
LOG_S = torch.randn(12, 3, generator=G, dtype=torch.float64).log_softmax(dim=1)


def weights_by_hand(method: Lame, z: Tensor) -> Tensor:
    """Affinities one pair at a time."""
    n = len(z)
    distance = [[float((a - b).norm()) for b in z] for a in z]
    w = torch.zeros(n, n, dtype=torch.float64)
    if method.affinity == "rbf":
        sigma = max(1e-6, sum(sorted(row)[method.neighbors - 1] for row in distance) / n)
    for i, j in itertools.product(range(n), range(n)):
        if method.affinity == "linear":
            w[i, j] = float(z[i] @ z[j])
        elif method.affinity == "rbf":
            w[i, j] = math.exp(-(distance[i][j] ** 2) / (2 * sigma**2))
        else:
            others = sorted((distance[i][k], k) for k in range(n) if k != i)[: method.neighbors]
            w[i, j] = float(j in [k for _, k in others])
    return (w + w.T) / 2 if method.symmetric else w


@pytest.mark.parametrize(
    "method",
    [
        Lame(affinity=a, neighbors=k, symmetric=s)
        for a in ("knn", "rbf", "linear")
        for k in (1, 3, 5)
        for s in (False, True)
    ],
    ids=str,
)
def test_affinities(method: Lame) -> None:
    torch.testing.assert_close(method.weights(FEATURES), weights_by_hand(method, FEATURES))


def test_two_neighbours_by_hand() -> None:
    """One iteration from Y0 = s with W = all ones: log s + the column sums of Y0, normalised."""
    log_s = torch.tensor(PROBS, dtype=torch.float64).log()
    found = propagate(log_s, torch.ones(3, 3, dtype=torch.float64), iterations=1)
    total = [sum(p[k] for p in PROBS) for k in (0, 1)]
    expected = [[p[k] * math.exp(total[k]) for k in (0, 1)] for p in PROBS]
    expected = [[v / sum(row) for v in row] for row in expected]
    torch.testing.assert_close(found.exp(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("affinity", ["rbf", "linear", "knn"])
def test_fixed_point(affinity: str) -> None:
    w = Lame(affinity=affinity, neighbors=2, symmetric=True).weights(FEATURES)
    log_y = propagate(LOG_S, w)
    torch.testing.assert_close(log_y, F.log_softmax(LOG_S + w @ log_y.exp(), dim=1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("affinity", ["rbf", "linear"])
def test_energy_never_rises_for_a_kernel(affinity: str) -> None:
    w = Lame(affinity=affinity).weights(FEATURES)
    energies = [float(energy_of(LOG_S, w, propagate(LOG_S, w, iterations=i))) for i in range(12)]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(energies))
    assert energies[-1] < energies[0]


def test_answers_are_log_probabilities() -> None:
    answer = trueup.adapt(convnet(), "lame")(images(20, seed=0)[0])
    torch.testing.assert_close(answer.exp().sum(dim=1), torch.ones(20))


def test_one_image_is_answered_by_the_model() -> None:
    torch.testing.assert_close(trueup.adapt(identity_head(), "lame")(X[:1]), X[:1].log_softmax(dim=1))


def test_identical_images() -> None:
    """All distances are 0: the width is clamped and nothing is divided by it."""
    x = images(1, seed=0)[0].expand(6, -1, -1, -1)
    for affinity in ("rbf", "knn", "linear"):
        assert trueup.adapt(convnet(), "lame", affinity=affinity)(x).isfinite().all()


@pytest.mark.parametrize("bad", [{"affinity": "cosine"}, {"neighbors": 0}, {"symmetric": "yes"}], ids=str)
def test_meaningless_values_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Lame(**bad)
