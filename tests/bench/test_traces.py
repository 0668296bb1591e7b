"""Traces against what was answered, image by image; every run of a sweep leaves one that its record names."""

import logging
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_masks import case, domain, sure

import trueup
from trueup.bench.scorers import EXAMPLES, SIDE, ClassScorer, MaskScorer, mean_dice, shrink, stack_padded
from trueup.data.domains import ArrayDomain
from trueup.data.loading import ConcatDomains
from trueup.report.groups import Traces


def test_classes_are_traced_in_the_order_of_the_stream() -> None:
    blank = np.zeros((3, 4, 4, 3), dtype=np.uint8)
    place = ConcatDomains([ArrayDomain("a", blank, np.array([0, 1, 1])), ArrayDomain("b", blank[:1], np.array([2]))])
    scorer = ClassScorer(place)
    scorer.take(torch.tensor([[0.0, 9, 0], [0, 0, 0]]), np.array([2, 0]))
    scorer.take(torch.tensor([[0.0, 0, 1]]), np.array([3]))
    trace = scorer.trace()
    assert {key: trace[key].tolist() for key in ("image", "domain", "batch", "label", "prediction")} == {
        "image": [2, 0, 3], "domain": [0, 0, 1], "batch": [0, 0, 1], "label": [1, 0, 2], "prediction": [1, 0, 2],
    }  # fmt: skip
    p = np.e / (np.e + 2)
    assert trace["confidence"][1:] == pytest.approx([1 / 3, p], rel=1e-6)
    entropy = -p * np.log(p) - 2 * (1 - p) / 2 * np.log((1 - p) / 2)
    assert trace["entropy"][1:] == pytest.approx([np.log(3), entropy], rel=1e-6)


def test_masks_are_traced_with_their_dice_and_the_last_are_kept() -> None:
    truth = np.zeros((5, 4, 4))
    truth[:, :2] = 1
    found = truth.copy()
    found[1, 1] = 0  # half of it
    found[4] = 2
    place = ConcatDomains([domain("d", case("c", truth))])
    scorer = MaskScorer(place, {"all": (1, 2), "core": (2,)})
    for at in ([0, 1], [2, 3], [4]):
        scorer.take(torch.stack([sure(found[i]) for i in at]).float(), np.array(at))
    trace = scorer.trace()
    # "core" is nowhere in the first four; in the last it is found where there is none.
    assert trace["dice"] == pytest.approx([1, 2 / 3, 1, 1, (2 * 8 / 24 + 0) / 2])
    assert trace["examples"].shape == (EXAMPLES, 4, 4, 3)
    assert trace["truth"].shape == trace["answer"].shape == (EXAMPLES, 2, 4, 4)
    assert np.array_equal(trace["truth"][:, 0], truth[-3:] > 0)
    assert np.array_equal(trace["answer"][:, 1], found[-3:] == 2)
    assert trace["structures"].tolist() == ["all", "core"]
    assert len(set(trace["example_names"].tolist())) == EXAMPLES
    assert trace["batch"].tolist() == [0, 0, 1, 1, 2]


def test_nothing_to_find_and_nothing_found_has_no_dice() -> None:
    empty = {"all": np.zeros((2, 2), dtype=bool)}
    assert np.isnan(mean_dice(empty, empty))


def test_large_images_shrink_and_small_ones_get_a_margin() -> None:
    large = np.arange(SIDE * 3 * 2, dtype=np.uint8).reshape(SIDE * 3, 2, 1)
    assert np.array_equal(shrink(large), large[::3, ::3])
    both = stack_padded([np.ones((2, 3, 1), np.uint8), np.ones((3, 1, 1), np.uint8)])
    assert both.shape == (2, 3, 3, 1)
    assert (both[0, :2].sum(), both[0, 2].sum(), both[1].sum()) == (6, 0, 3)


def test_traces_that_cannot_be_read_are_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "cut.npz").write_bytes(b"PK\x03\x04")
    np.savez(folder / "evil.npz", x=np.array([{"a": 1}], dtype=object))
    np.savez(folder / "fine.npz", x=np.arange(2))
    np.savez_compressed(folder / "flipped.npz", x=np.arange(500))
    whole = bytearray((folder / "flipped.npz").read_bytes())
    for at in range(60, len(whole) - 60):  # whatever is wrong with it
        (folder / "flipped.npz").write_bytes(bytes([*whole[:at], whole[at] ^ 255, *whole[at + 1 :]]))
        found = Traces(tmp_path)({"id": "flipped", "trace": "traces/flipped.npz"})
        assert found is None or set(found) <= {"x"}
    header = np.lib.format.magic(1, 0) + (118).to_bytes(2, "little")
    text = "{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000,), }"
    with zipfile.ZipFile(folder / "boast.npz", "w") as archive:
        archive.writestr("x.npy", header + text.ljust(117).encode() + b"\n")
    read = Traces(tmp_path)
    assert read({"id": "boast", "trace": "traces/boast.npz"}) is None
    assert read({"id": "cut", "trace": "traces/cut.npz"}) is None
    assert read({"id": "evil", "trace": "traces/evil.npz"}) is None
    assert read({"id": "gone", "trace": "traces/gone.npz"}) is None
    assert read({"id": "fine"}) is None  # its record knows nothing of it
    trace = read({"id": "fine", "trace": "traces/fine.npz"})
    assert trace is not None
    assert trace["x"].tolist() == [0, 1]


def test_a_run_leaves_the_logger_of_guards_as_it_was(tmp_path: Path) -> None:
    log = logging.getLogger("trueup.guard")
    before = log.level
    settings: dict[str, Any] = {"dataset": "digits", "target": "type", "method": "tsd", "seed": 0, "limit": 32}
    trueup.run(tmp_path, **settings, training={"iterations": 1})
    assert log.level == before
