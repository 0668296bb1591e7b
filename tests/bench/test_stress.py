"""Scenarios: what each changes of a run, that runs tell their scenario, and what is left out where."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from toy_settings import folder

from trueup.bench.settings import MASK_METHODS, PAPER_METHODS, Run, make_sweep, read_settings, validate_settings
from trueup.bench.stress import (
    SCENARIOS,
    SMALL,
    Stress,
    label_of,
    scenario_of,
    with_next_domain,
)
from trueup.bench.sweep import plan
from trueup.core.presets import with_preset
from trueup.data.datasets import open_dataset

ONE: dict[str, Any] = {"target": "hand", "seed": 0, "method": ["source", "tsd"]}


def stress(**values: Any) -> Stress:
    return validate_settings(Stress, values)


def of(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs by the scenario that their records would tell."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(scenario_of(run.model_dump(mode="json")), []).append(run)
    return found


# What runs


def test_every_scenario_is_told_by_its_runs() -> None:
    found = of(stress(**ONE).runs())
    assert list(found) == list(SCENARIOS)
    assert {len(runs) for runs in found.values()} == {2}
    for name in SCENARIOS:
        assert list(of(stress(**ONE, scenario=name).runs())) == [name]


def test_scenarios_change_what_they_are_called_and_nothing_else() -> None:
    found = {name: runs[1] for name, runs in of(stress(**ONE).runs()).items()}
    plain = make_sweep({**ONE, "method": "tsd"}).runs()[0]
    expected: dict[str, dict[str, Any]] = {
        "iid": {},
        "dirichlet": {"stream": "dirichlet"},
        "class-sorted": {"stream": "class-sorted"},
        "mixed": {"stream": "mixed", "target": "hand+type"},
        "few-classes": {"stream": "few-classes"},
        "batch-1": {"batch": 1, "limit": 1000},
        "batch-2": {"batch": 2, "limit": 1000},
        "batch-4": {"batch": 4, "limit": 1000},
        "batch-16": {"batch": 16},
        "long": {"repeat": 20, "limit": 1000},
        "nan": {"disturb": "nan"},
        "huge": {"disturb": "huge"},
        "ood-10": {"disturb": "ood:0.1"},
        "ood-50": {"disturb": "ood:0.5"},
        "replay-10": {"disturb": "replay:0.1"},
        "crafted-10": {"disturb": "crafted:0.1"},
    }
    assert found == {name: plain.model_copy(update=changes) for name, changes in expected.items()}
    assert found["iid"].digest() == plain.digest()


def test_usual_methods_are_the_papers_and_the_safe_preset() -> None:
    test = stress(target="hand", seed=0, scenario="iid")
    assert [(run.method, run.guard) for run in test.runs()] == [
        *((name, False) for name in PAPER_METHODS),
        ("tsd", True),
    ]
    masks = stress(dataset="fundus-sim", target="screening", seed=0, scenario="iid")
    assert [(run.method, run.guard) for run in masks.runs()] == [
        *((name, False) for name in MASK_METHODS),
        ("tsd", True),
    ]
    everything = stress(method="bn")
    assert everything.seed == [0, 1, 2]
    assert {run.target for run in everything.runs() if "+" not in run.target} == {"hand", "type", "poster", "neon"}


def test_source_is_always_there_once() -> None:
    for methods in ("tent", ["tent", "source"], {"tent": {"lr": 1e-3}}):
        runs = stress(target="hand", seed=0, scenario="nan", method=methods).runs()
        assert Counter(run.method for run in runs) == {"source": 1, "tent": 1}


def test_quick_is_one_seed_one_target_and_few_images() -> None:
    found = of(stress(quick=True, method="bn", seed=[4, 5], target=["neon", "hand"]).runs())
    assert list(found) == list(SCENARIOS)
    assert {(run.seed, run.limit) for runs in found.values() for run in runs} == {(4, 256)}
    assert {run.target for name, runs in found.items() if name != "mixed" for run in runs} == {"neon"}
    assert found["mixed"][0].target == "neon+hand"
    assert [run.repeat for run in found["long"]] == [4, 4]
    assert of(stress(quick=True, method="bn", limit=32).runs())["long"][0].limit == 32


@pytest.mark.parametrize(
    ("limit", "expected"), [(300, (300, 300, 300)), (5000, (1000, 5000, 1000)), (None, (1000, None, 1000))]
)
def test_limit_of_the_user_and_of_the_scenario(limit: int | None, expected: tuple[int | None, ...]) -> None:
    found = of(stress(**ONE, limit=limit).runs())
    assert tuple(found[name][0].limit for name in ("batch-1", "iid", "long")) == expected


def test_methods_of_a_scenario_share_a_runner(tmp_path: Path) -> None:
    test = stress(target="hand", seed=[0, 1], method=["source", "tent", "tsd", "tsd:preset=safe"])
    todo = plan(test, tmp_path)
    assert len(todo.jobs) == 2 * len(SCENARIOS)
    assert {len(job.runs) for job in todo.jobs} == {4}
    assert len(todo.trainings) == 4  # of two seeds, for one target and for the joined one


def test_a_file_of_settings(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("scenario: [nan, ood-10]\nmethod: [tent]\nquick: true\nseed: 3\n")
    runs = stress(**read_settings(tmp_path / "s.yaml", {"target": ["neon"]})).runs()
    assert list(of(runs)) == ["nan", "ood-10"]
    assert {(run.target, run.seed) for run in runs} == {("neon", 3)}


# Names


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"disturb": "ood:0.25"}, "ood-25"),
        ({"disturb": "replay:0.05", "batch": 1}, "replay-5"),
        ({"disturb": "huge", "repeat": 3}, "huge"),
        ({"repeat": 2, "stream": "mixed"}, "long"),
        ({"stream": "gradual"}, "gradual"),
        ({"batch": 8}, "iid"),
        ({"batch": 2}, "batch-2"),
    ],
)
def test_name_of_a_run_follows_from_its_settings(changes: dict[str, Any], name: str) -> None:
    assert scenario_of({"stream": "iid", "batch": 64} | changes) == name


def test_runs_of_the_preset_have_its_name() -> None:
    runs = stress(target="hand", seed=0, scenario="iid", method=["tsd", "tsd:guard=true", "tsd:preset=safe"]).runs()
    assert [label_of(run.model_dump(mode="json")) for run in runs] == ["", "", "", "tsd, safe"]
    (other,) = make_sweep({**ONE, "method": {"tsd": {"preset": "safe", "guard": False}}}).runs()
    assert label_of(other.model_dump(mode="json")) == ""
    assert with_preset("safe", {}).items() <= runs[-1].hyper.items()


# Partners


def test_a_target_is_mixed_with_the_one_that_follows_it() -> None:
    digits = open_dataset("digits")
    assert [with_next_domain(digits, t) for t in digits.targets] == [
        "hand+type",
        "type+poster",
        "poster+neon",
        "neon+hand",
    ]
    assert with_next_domain(digits, "hand+neon") == "hand+neon"
    corrupted = open_dataset("digits-c")
    first, second = corrupted.targets[:2]
    assert with_next_domain(corrupted, f"{first}-3") == f"{first}-3+{second}-3"
    assert with_next_domain(corrupted, corrupted.targets[-1]) == f"{corrupted.targets[-1]}+{first}"


# What is left out


def test_masks_have_no_scenarios_that_go_by_class() -> None:
    test = stress(dataset="fundus-sim", target="screening", seed=0, method="bn")
    gone = ["dirichlet", "class-sorted", "few-classes", "replay-10", "crafted-10"]
    assert list(of(test.runs())) == [name for name in SCENARIOS if name not in gone]
    assert [note.partition(" is left out on fundus-sim: it needs classes")[0] for note in test.left_out()] == gone
    assert stress(**ONE).left_out() == []


def test_two_domains_cannot_be_mixed_for_want_of_a_third(tmp_path: Path) -> None:
    test = stress(dataset="folder", root=str(folder(tmp_path, "a", "b")), seed=0, method="bn")
    assert "mixed" not in of(test.runs())
    assert test.left_out() == [
        "mixed is left out on folder: all domains of folder are targets; leave at least one to train on"
    ]
    with pytest.raises(ValueError, match="no scenario is left: mixed is left out"):
        stress(dataset="folder", root=str(tmp_path), seed=0, method="bn", scenario="mixed").runs()


def test_a_model_and_images_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"model")
    values = {"dataset": "folder", "root": str(folder(tmp_path / "mine", "a")), "seed": 0, "method": "bn"}
    test = stress(**values, checkpoint=str(tmp_path / "model.pt"))
    assert [name for name in SCENARIOS if name not in of(test.runs())] == ["mixed"]
    assert "there is no other domain to mix a target with" in test.left_out()[0]
    folder(tmp_path / "mine", "b")
    assert list(of(stress(**values, checkpoint=str(tmp_path / "model.pt")).runs())) == list(SCENARIOS)


def test_a_model_of_each_target_has_none_of_two(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.pt").write_bytes(b"model")
    root = str(folder(tmp_path / "mine", "a", "b", "c"))
    test = stress(dataset="folder", root=root, seed=0, method="bn", checkpoint=f"{tmp_path}/{{target}}.pt")
    assert [name for name in SCENARIOS if name not in of(test.runs())] == ["mixed"]


# What is refused


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scenario": "nam"}, "no scenario is called 'nam'. Did you mean 'nan'"),
        ({"scenarios": "nan"}, "'scenarios'. Did you mean 'scenario'"),
        ({"scenario": []}, "scenario"),
        ({"stream": "mixed"}, "stream is set by the scenarios: leave it out, or use `trueup bench`"),
        ({"stream_options": {"classes": 2}}, "stream_options is set by the scenarios"),
        ({"disturb": "nan"}, "disturb is set by the scenarios"),
        ({"repeat": 2}, "repeat is set by the scenarios"),
        ({"reset": True}, "reset is set by the scenarios"),
        ({"batch": [32, 64]}, "must be one number"),
        ({"batch": SMALL[1]}, "none of"),
        ({"target": "hamd"}, "'hamd'. Did you mean 'hand'"),
        ({"method": "tsdd"}, "'tsdd'. Did you mean 'tsd'"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stress(**values).runs()
    assert stress(**ONE, batch=32, scenario="iid").runs()[0].batch == 32
