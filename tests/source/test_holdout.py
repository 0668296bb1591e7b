"""Which images train and which are held out."""

import numpy as np
import pytest
import scans

from trueup.data.domains import ArrayDomain, Labels
from trueup.source.tasks import split_holdout


def labelled(counts: list[int], name: str = "amber") -> ArrayDomain:
    labels: Labels = np.repeat(np.arange(len(counts)), counts)
    return ArrayDomain(name, np.zeros((len(labels), 1, 1, 3), np.uint8), np.random.default_rng(0).permutation(labels))


def test_a_fifth_of_every_class_is_held_out() -> None:
    made = labelled([10, 20, 55, 5])
    trains, held = split_holdout(made, 0.2, 0)
    assert np.bincount(made.labels[held]).tolist() == [2, 4, 11, 1]
    assert np.bincount(made.labels[trains]).tolist() == [8, 16, 44, 4]


def test_the_two_parts_are_disjoint_sorted_and_cover_all() -> None:
    trains, held = split_holdout(labelled([7, 13, 4]), 0.3, 1)
    assert sorted([*trains, *held]) == list(range(24))
    assert trains.tolist() == sorted(trains)
    assert held.tolist() == sorted(held)


def test_the_split_depends_on_the_seed_and_the_name_alone() -> None:
    made = labelled([50, 50])
    parts = [split_holdout(d, 0.2, s)[1].tolist() for d, s in ((made, 0), (made, 1), (labelled([50, 50], "blue"), 0))]
    assert parts[0] != parts[1]
    assert parts[0] != parts[2]
    np.random.seed(5)
    assert split_holdout(labelled([50, 50]), 0.2, 0)[1].tolist() == parts[0]


@pytest.mark.parametrize("holdout", [0.2, 0.5, 0.99])
def test_a_class_with_one_image_trains(holdout: float) -> None:
    made = labelled([1, 10, 1])
    trains, held = split_holdout(made, holdout, 0)
    assert set(made.labels[trains]) == {0, 1, 2}
    assert set(made.labels[held]) == {1}


def test_one_image_of_each_class_always_trains() -> None:
    trains, held = split_holdout(labelled([10]), 0.99, 0)
    assert (len(trains), len(held)) == (1, 9)


# Patients


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("holdout", [0.2, 0.5, 0.9])
def test_a_patient_is_never_divided(holdout: float, seed: int) -> None:
    """Two cases of three slices each: all six are on one side."""
    made = scans.domain("amber", 10, scans=2, slices=3)
    trains, held = split_holdout(made, holdout, seed)
    assert sorted([*trains, *held]) == list(range(60))
    assert trains.tolist() == sorted(trains)
    assert held.tolist() == sorted(held)
    patients = [{i // 6 for i in part.tolist()} for part in (trains, held)]
    assert not patients[0] & patients[1]
    assert [len(p) for p in patients] == [10 - round(10 * holdout), round(10 * holdout)]


def test_patients_are_held_out_by_seed_and_name() -> None:
    made = scans.domain("amber", 20)
    parts = [split_holdout(d, 0.3, s)[1].tolist() for d, s in ((made, 0), (made, 1), (scans.domain("blue", 20), 0))]
    assert parts[0] != parts[1]
    assert parts[0] != parts[2]
    assert split_holdout(scans.domain("amber", 20), 0.3, 0)[1].tolist() == parts[0]


def test_of_few_patients_one_is_held_out_and_one_trains() -> None:
    for patients, holdout in ((2, 0.01), (2, 0.99), (3, 0.1)):
        trains, held = split_holdout(scans.domain("amber", patients), holdout, 0)
        assert len(held) == 2
        assert len(trains) == 2 * (patients - 1)
    trains, held = split_holdout(scans.domain("amber", 3), 0.99, 0)
    assert (len(trains), len(held)) == (2, 4)


def test_a_single_patient_trains() -> None:
    trains, held = split_holdout(scans.domain("amber", 1, scans=2), 0.5, 0)
    assert (trains.tolist(), held.tolist()) == ([0, 1, 2, 3], [])


def test_nothing_is_held_out_where_nothing_is_to_be() -> None:
    """A model from elsewhere was trained on who knows which images; all are source images for it."""
    assert split_holdout(scans.domain("amber", 4), 0.0, 0)[1].tolist() == []
    assert split_holdout(labelled([4, 4]), 0.0, 0)[1].tolist() == []
