"""Sweeps: which runs a few lines mean."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from toy_settings import folder, one, runs

import trueup.core.registry as registry
from trueup.bench import method_spec as specs
from trueup.bench.settings import PAPER_METHODS, Run, Sweep, make_sweep, read_settings
from trueup.data.datasets import open_dataset
from trueup.source.recipe import Training

# Expansion


def test_sweep_is_the_product_of_its_lists() -> None:
    found = runs(
        target=["hand", "neon"], network=["digits-net", "resnet18"], stream=["iid", "class-sorted"], batch=[8, 16],
        select=["default", "source"], seed=[0, 1], method=["tsd", "tent"],
    )  # fmt: skip
    assert len(found) == len({run.digest() for run in found}) == 2**7
    names = ("target", "network", "stream", "batch", "select", "seed", "method")
    assert {tuple(getattr(run, name) for name in names) for run in found} == {
        (t, n, s, b, e, k, m)
        for t in ("hand", "neon")
        for n in ("digits-net", "resnet18")
        for s in ("iid", "class-sorted")
        for b in (8, 16)
        for e in ("default", "source")
        for k in (0, 1)
        for m in ("tsd", "tent")
    }


def test_default_sweep_is_the_papers_methods_on_all_digits_with_three_seeds() -> None:
    found = runs()
    assert len(found) == 9 * 4 * 3
    assert [run.method for run in found[:9]] == list(PAPER_METHODS)
    assert {run.target for run in found} == {"hand", "type", "poster", "neon"}
    assert {run.select for run in found} == {"default"}
    assert {(run.reset, run.limit, run.stream) for run in found} == {(False, None, "iid")}


@pytest.mark.parametrize(
    "twice",
    [
        {"seed": [0, 0]},
        {"target": ["hand", "hand"]},
        {"method": ["tsd", "tsd"]},
        {"method": ["tsd", {"tsd": {}}, {"tsd": {"lr": 1e-4}}, {"tsd": {"lr": "1e-4", "neighbors": 3}}]},
        {"batch": [64, 64]},
        {"dataset": ["digits", "digits"]},
    ],
)
def test_run_that_is_asked_for_twice_is_there_once(twice: dict[str, Any]) -> None:
    assert one(**twice) == one()


@pytest.mark.parametrize("field", ["dataset", "target", "network", "method", "seed", "stream", "batch", "select"])
def test_one_value_is_a_list_of_one(field: str) -> None:
    value = {"dataset": "digits", "target": "neon", "network": "resnet18", "method": "tent", "seed": 3}
    value |= {"stream": "mixed", "batch": 7, "select": "source"}
    assert one(**{field: value[field]}) == one(**{field: [value[field]]}) == one(**{field: (value[field],)})
    assert getattr(one(**{field: value[field]}), field) == value[field]


def test_two_domains_are_one_stream() -> None:
    run = one(target="hand+neon", stream="continual")
    assert run.targets == ("hand", "neon")
    recipe = run.recipe(open_dataset("digits"))
    assert recipe is not None
    assert recipe.sources == ("type", "poster")


def test_recipe_leaves_the_target_out_and_has_the_runs_seed() -> None:
    recipe = one(target="type", seed=2).recipe(open_dataset("digits"))
    assert recipe is not None
    assert recipe.sources == ("hand", "poster", "neon")
    assert (recipe.seed, recipe.classes, recipe.network, recipe.weights) == (2, 10, "digits-net", "none")
    assert recipe.training == one(target="type", seed=2).source


def test_recipe_does_not_depend_on_method_batch_or_stream() -> None:
    dataset = open_dataset("digits")
    assert one().recipe(dataset) == one(method="lame", batch=3, stream="class-sorted", limit=9).recipe(dataset)


# Defaults of datasets


def test_digits_have_their_own_network_batch_and_training() -> None:
    run = one()
    assert (run.network, run.weights, run.batch) == ("digits-net", "none", 64)
    assert isinstance(run.source, Training)
    assert (run.source.size, run.source.normalize, run.source.augment) == (32, "half", "none")


def test_corrupted_digits_have_severities_and_train_on_clean_images() -> None:
    found = runs(dataset="digits-c", target=["fog", "fog-3"], seed=0, method="bn")
    assert [run.target for run in found] == ["fog", "fog-3"]
    recipe = found[1].recipe(open_dataset("digits-c"))
    assert recipe is not None
    assert recipe.sources == ("clean",)


def test_folders_get_the_papers_network_batch_and_training(tmp_path: Path) -> None:
    (run,) = runs(dataset="folder", root=str(folder(tmp_path, "a", "b")), target="a", seed=0, method="tsd")
    assert (run.network, run.weights, run.batch) == ("resnet50", "imagenet", 128)
    assert isinstance(run.source, Training)
    assert run.source == Training()
    assert (run.source.iterations, run.source.lr, run.source.batch) == (5000, 5e-5, 32)


def test_several_datasets_have_their_own_roots_and_defaults(tmp_path: Path) -> None:
    root = folder(tmp_path / "mine", "a", "b")
    found = runs(dataset=["digits", "folder"], root={"folder": str(root)}, seed=0, method="bn")
    assert [(run.dataset, run.target, run.batch) for run in found] == [
        *(("digits", name, 64) for name in ("hand", "type", "poster", "neon")),
        ("folder", "a", 128),
        ("folder", "b", 128),
    ]
    assert found[0].data == "1"
    assert found[-1].data != ""


def test_no_folder_is_in_a_runs_settings(tmp_path: Path) -> None:
    first = runs(dataset="folder", root=str(folder(tmp_path / "one", "a", "b")), seed=0, method="bn")
    second = runs(dataset="folder", root=str(folder(tmp_path / "two", "a", "b")), seed=0, method="bn")
    assert first == second
    assert str(tmp_path) not in first[0].model_dump_json()


def test_dataset_with_other_files_is_another_run(tmp_path: Path) -> None:
    root = folder(tmp_path, "a", "b")
    before = runs(dataset="folder", root=str(root), target="a", seed=0, method="bn")
    Image.new("RGB", (8, 8)).save(root / "a" / "cat" / "1.png")
    assert runs(dataset="folder", root=str(root), target="a", seed=0, method="bn") != before


# Guards and presets


SAFE = {"norm": "ema", "lr": 1e-3, "steps": 2}


@pytest.fixture
def presets(monkeypatch: pytest.MonkeyPatch) -> None:
    """One preset, whatever the library's are."""

    def with_preset(name: str, hyper: dict[str, Any]) -> dict[str, Any]:
        if name != "safe":
            raise ValueError(f"no preset is called {name!r}")
        return {**SAFE, **hyper}

    monkeypatch.setattr(specs, "with_preset", with_preset)


@pytest.mark.parametrize("spec", ["tsd:guard=true", {"tsd": {"guard": True}}, "tsd:guard=true,lr=1e-4"])
def test_guard_is_a_setting_of_the_run_not_of_the_method(spec: Any) -> None:
    run = one(method=spec)
    assert run.guard
    assert run.hyper == one().hyper
    assert run.model_dump(mode="json")["guard"] is True
    assert run.model_copy(update={"guard": False}) == one()


@pytest.mark.parametrize("spec", ["tsd:preset=safe", {"tsd": {"preset": "safe"}}])
def test_preset_is_its_hyper_parameters_and_a_guard(spec: Any, presets: None) -> None:
    run = one(method=spec)
    assert run.guard
    assert run.hyper == one(method={"tsd": SAFE}).hyper
    assert "preset" not in run.model_dump(mode="json")


def test_what_is_said_beside_a_preset_wins(presets: None) -> None:
    run = one(method="tsd:preset=safe,lr=1e-5,guard=false")
    assert (run.guard, run.hyper["lr"], run.hyper["norm"], run.hyper["steps"]) == (False, 1e-5, "ema", 2)


def test_search_leaves_a_presets_values_alone(presets: None) -> None:
    run = one(method="tsd:preset=safe", select="source")
    assert (run.guard, run.hyper["lr"]) == (True, 1e-3)
    assert "per_class" not in run.hyper


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tsd:preset=save", "'save'"),
        ("tsd:guard=perhaps", "guard='perhaps' must be true or false"),
        ("tsd:guard=1", "guard=1 must be true or false"),
        ("tsd:gard=true", "no hyper-parameter 'gard'"),
    ],
)
def test_unknown_guard_or_preset_is_refused(spec: str, message: str, presets: None) -> None:
    with pytest.raises(ValueError, match=message):
        one(method=spec)


# Disturbances


@pytest.mark.parametrize(
    ("said", "meant"), [("nan", "nan"), ("ood:0.10", "ood:0.1"), ("replay:1e-1", "replay:0.1"), ("", "")]
)
def test_disturbance_has_one_name(said: str, meant: str) -> None:
    assert one(disturb=said).disturb == meant


@pytest.mark.parametrize("said", ["nam", "nan:0.1", "ood", "ood:0", "ood:1", "ood:much", "ood:nan", "crafted:-0.1"])
def test_unknown_disturbance_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match=r"disturb: '.*' must be nan or huge, or one of ood, replay, crafted with"):
        runs(disturb=said)


def test_masks_have_no_classes_to_attack() -> None:
    values = {"dataset": "fundus-sim", "seed": 0, "method": "bn", "target": "screening"}
    for disturb in ("replay:0.1", "crafted:0.1"):
        with pytest.raises(ValueError, match=f"disturb='{disturb}' does not fit fundus-sim, which has masks"):
            runs(**values, disturb=disturb)
    assert runs(**values, disturb="ood:0.1")[0].disturb == "ood:0.1"


def test_a_model_from_elsewhere_needs_no_other_domain(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"model")
    values = {"dataset": "folder", "root": str(folder(tmp_path / "mine", "a")), "seed": 0, "method": "bn"}
    with pytest.raises(ValueError, match="leave at least one to train on"):
        runs(**values)
    (run,) = runs(**values, checkpoint=str(tmp_path / "model.pt"))
    assert run.target == "a"


# Searches


def test_what_is_searched_is_not_in_the_settings() -> None:
    run = one(select="source")
    assert run.select == "source"
    assert set(one().hyper) - set(run.hyper) == {"lr", "per_class"}
    assert set(one(method="lame").hyper) - set(one(method="lame", select="oracle").hyper) == {"affinity", "neighbors"}


def test_given_value_is_not_searched() -> None:
    run = one(select="source", method={"tsd": {"lr": 1e-5}})
    assert run.hyper["lr"] == 1e-5
    assert "per_class" not in run.hyper
    assert run.select == "source"


@pytest.mark.parametrize("method", ["source", "bn", {"tsd": {"lr": 1e-5, "per_class": 5}}])
def test_method_with_nothing_to_search_runs_as_it_is(method: Any) -> None:
    assert one(select="source", method=method) == one(method=method)
    assert one(select="oracle", method=method) == one(method=method)
    assert one(select=["default", "source", "oracle"], method=method) == one(method=method)


def test_search_is_never_the_default() -> None:
    assert Sweep().select == ["default"]
    assert Run.model_fields["select"].default == "default"


def test_oracle_and_source_search_are_different_runs() -> None:
    found = runs(target="hand", seed=0, method="tsd", select=["default", "source", "oracle"])
    assert [run.select for run in found] == ["default", "source", "oracle"]
    assert len({run.digest() for run in found}) == 3


def test_settings_are_not_changed_by_reading_them() -> None:
    values: dict[str, Any] = {"method": [{"tsd": {"lr": "1e-5"}}], "training": {"lr": "1e-3"}, "target": "hand"}
    make_sweep(values).runs()
    assert values == {"method": [{"tsd": {"lr": "1e-5"}}], "training": {"lr": "1e-3"}, "target": "hand"}


def test_flags_are_merged_with_the_files_training(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("training: {iterations: 20, size: 24}\ntarget: hand\nseed: 0\nmethod: tsd\n")
    (run,) = make_sweep(read_settings(tmp_path / "s.yaml", {"training": {"lr": 0.5}})).runs()
    assert isinstance(run.source, Training)
    assert (run.source.iterations, run.source.size, run.source.lr) == (20, 24, 0.5)


MINE = """
from dataclasses import dataclass
from trueup import Info, Method, register

@register
@dataclass(frozen=True, kw_only=True)
class Mine(Method):
    info = Info(name="mine", title="Mine", paper="none")
"""


def test_a_method_of_ones_own_that_has_changed_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    Path("mine_method.py").write_text(MINE)
    first = one(method="mine", plugin="mine_method")
    assert first.code["method"].startswith("sha256:")
    assert one(method="tsd", plugin="mine_method").code == {}
    Path("mine_method.py").write_text(MINE + "# changed\n")
    assert one(method="mine", plugin="mine_method").digest() != first.digest()


def test_a_network_of_ones_own_that_has_changed_is_another_run_and_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine_net.py").write_text("def net(classes): ...\n")
    first = one(network="mine_net:net")
    Path("mine_net.py").write_text("def net(classes): return 1\n")
    again = one(network="mine_net:net")
    assert first.digest() != again.digest()
    recipes = [run.recipe(open_dataset("digits")) for run in (first, again)]
    assert recipes[0] != recipes[1]


def test_a_search_with_a_checkpoint_and_a_repeated_domain_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"model")
    with pytest.raises(ValueError, match="which a checkpoint does not have"):
        runs(checkpoint=str(tmp_path / "model.pt"), select="source")
    with pytest.raises(ValueError, match="names a domain twice"):
        runs(target="hand+hand", stream="mixed")
