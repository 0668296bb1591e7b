"""Alignment and uniformity equal loops over pairs; observing changes no answer; traces hold what was answered."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import trueup
from trueup.bench.feature_metrics import (  # fmt: skip
    MOST,
    PLANE,
    SHOWN,
    WINDOWS,
    FeatureRecorder,
    alignment,
    measure_features,
    project_for_trace,
    separation,
    to_unit_sphere,
    uniformity,
    uniformity_per_class,
)
from trueup.bench.jobs import write_trace
from trueup.core.adapter import Adapter
from trueup.core.registry import make_method
from trueup.testing import convnet, images

RNG = np.random.default_rng(0)
Z = RNG.normal(size=(23, 5)) * RNG.uniform(0.1, 9, size=(23, 1))
Y = RNG.integers(0, 3, size=23)


def pairs(z: np.ndarray) -> list[float]:
    """Squared distances of all pairs on the sphere, one by one."""
    z = np.array([row / np.sqrt((row**2).sum()) for row in z])
    return [float(((a - b) ** 2).sum()) for a, b in itertools.combinations(z, 2)]


def test_alignment_is_the_mean_over_pairs_of_a_class() -> None:
    found = alignment(Z, Y, 4)
    assert found[3] is None
    for k in range(3):
        assert found[k] == pytest.approx(np.mean(pairs(Z[k == Y])), rel=1e-12)


def test_uniformity_is_the_log_of_the_mean_potential() -> None:
    assert uniformity(Z) == pytest.approx(np.log(np.mean(np.exp(-2 * np.array(pairs(Z))))), rel=1e-12)


def test_separation_compares_pairs_of_one_class_with_pairs_of_two() -> None:
    z = [row / np.sqrt((row**2).sum()) for row in Z]
    both = list(itertools.combinations(range(23), 2))
    inside = [((z[i] - z[j]) ** 2).sum() for i, j in both if Y[i] == Y[j]]
    across = [((z[i] - z[j]) ** 2).sum() for i, j in both if Y[i] != Y[j]]
    assert separation(Z, Y) == pytest.approx(np.mean(inside) / np.mean(across), rel=1e-12)
    assert separation(Z, np.zeros(23, dtype=int)) is None
    assert separation(Z[:2], np.array([0, 1])) is None
    assert separation(np.ones((3, 2)), np.array([0, 0, 1])) is None  # all in one place


def test_uniformity_of_a_class_is_over_pairs_with_one_of_it() -> None:
    z = [row / np.sqrt((row**2).sum()) for row in Z]
    for k in range(3):
        pairs = [(i, j) for i in range(23) for j in range(23) if i != j and Y[i] == k]
        potential = [np.exp(-2 * ((z[i] - z[j]) ** 2).sum()) for i, j in pairs]
        assert uniformity_per_class(Z, Y, 4)[k] == pytest.approx(np.log(np.mean(potential)), rel=1e-12)
    assert uniformity_per_class(Z, Y, 4)[3] is None
    assert uniformity_per_class(Z[:1], Y[:1], 3) == [None] * 3


def test_by_hand() -> None:
    z = np.array([[2.0, 0], [0, 5.0], [3.0, 0]])  # distances on the sphere: √2, 0, √2
    assert alignment(z, np.array([0, 0, 1]), 2) == [pytest.approx(2.0), None]
    assert uniformity(z) == pytest.approx(np.log((2 * np.exp(-4) + 1) / 3))


def test_one_feature_has_no_pair() -> None:
    assert (uniformity(Z[:1]), alignment(Z[:1], Y[:1], 3)) == (None, [None] * 3)


def test_zeros_stay_where_they_are() -> None:
    assert np.array_equal(to_unit_sphere(np.zeros((2, 3))), np.zeros((2, 3)))


def test_parts_of_a_stream_are_measured_alone() -> None:
    at = np.arange(0, 46, 2)
    found = measure_features(Z, Y, at, 3)
    parts = np.array_split(np.arange(23), WINDOWS)
    assert found["along"]["images"] == [int(at[p[-1]]) + 1 for p in parts]
    assert found["along"]["uniformity"][0] == pytest.approx(uniformity(Z[:3]))
    first = [value for value in alignment(Z[:3], Y[:3], 3) if value is not None]
    assert found["along"]["alignment"][0] == (pytest.approx(np.mean(first)) if first else None)
    assert found["alignment"] == pytest.approx(np.mean(alignment(Z, Y, 3)))


def test_main_directions_keep_distances() -> None:
    wide = RNG.normal(size=(30, 80)) @ np.diag([1.0] * 40 + [0.0] * 40)
    flat = project_for_trace(wide).astype(float)
    assert flat.shape == (30, 30)  # thirty points span no more
    assert project_for_trace(RNG.normal(size=(200, 80))).shape == (200, PLANE)
    ours = np.linalg.norm(flat[:, None] - flat[None], axis=2)
    theirs = np.linalg.norm(to_unit_sphere(wide)[:, None] - to_unit_sphere(wide)[None], axis=2)
    assert np.allclose(ours, theirs, atol=5e-3)


@pytest.mark.parametrize("method", ["source", "t3a", "lame", "tent", "tsd"])
@pytest.mark.parametrize("guard", [False, True])
def test_observing_changes_nothing_and_records_the_features(method: str, guard: bool) -> None:
    x = images(60, seed=0, shift=1.0)[0]
    recorder, plain = FeatureRecorder(60), make_method(method, {})
    setting = {"guard": trueup.Guard()} if guard else {}
    observed = Adapter(convnet(), plain, seed=0, **setting)
    observed.answer_observers.append(recorder.observe)
    alone = Adapter(convnet(), plain, seed=0, **setting)
    for batch in x.split(20):
        assert torch.equal(observed(batch), alone(batch))
        recorder.keep(np.ones(len(batch), dtype=bool))
    assert recorder.at == list(range(60))
    assert repr(observed) == repr(alone)
    if method == "source":
        features = alone.net(x, update=False).features.double().numpy()
        assert np.allclose(np.concatenate(recorder.kept), features, atol=1e-6)


def test_intruders_are_not_kept() -> None:
    recorder = FeatureRecorder(4)
    recorder.batch.append(torch.arange(6.0).reshape(3, 2))
    recorder.keep(np.array([True, False, True]))
    assert recorder.at == [0, 1]
    assert np.array_equal(np.concatenate(recorder.kept), [[0, 1], [4, 5]])


def test_batch_that_was_not_answered_row_by_row_is_left_out() -> None:
    recorder = FeatureRecorder(6)
    recorder.batch.append(torch.ones(2, 2))  # a row was put aside
    recorder.keep(np.ones(3, dtype=bool))
    recorder.batch.append(torch.tensor([[1.0, 2], [float("nan"), 0], [3, 4]]))
    recorder.keep(np.ones(3, dtype=bool))
    assert recorder.at == [3, 5]
    assert len(recorder.results(np.arange(6) % 2, 2)["alignment_per_class"]) == 2


def test_nothing_recorded_gives_nothing() -> None:
    recorder = FeatureRecorder(3)
    recorder.keep(np.ones(3, dtype=bool))
    assert (recorder.results(np.zeros(3, dtype=int), 2), recorder.trace()) == ({}, {})


def test_long_streams_are_sampled_evenly() -> None:
    recorder = FeatureRecorder(10 * MOST)
    for _ in range(100):
        recorder.batch.append(torch.ones(MOST // 10, 2))
        recorder.keep(np.ones(MOST // 10, dtype=bool))
    assert recorder.at == list(range(0, 10 * MOST, 10))
    assert len(recorder.trace()["sample"]) == SHOWN


def test_trace_is_written_whole_and_without_pickle(tmp_path: Path) -> None:
    name = write_trace(tmp_path / "traces", "abc", {"label": np.arange(3), "names": np.array(["a", "b"])})
    assert name == "traces/abc.npz"
    with np.load(tmp_path / name, allow_pickle=False) as file:
        assert sorted(file.files) == ["label", "names"]
    with pytest.raises(ValueError, match="pickle"):
        write_trace(tmp_path / "traces", "def", {"label": np.array([object()])})
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["abc.npz"]
