"""Settings: what a few lines mean, what is refused and how, and what makes two runs the same run."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trueup.core.registry as registry
from trueup.bench import method_spec as specs
from trueup.bench.settings import PAPER, Run, Sweep, make_sweep, read_sweep
from trueup.core.registry import get_method
from trueup.data.datasets import open_dataset
from trueup.source.recipe import Given, Training

GREY = {"training": {"normalize": [[0.1, 0.2, 0.3], 0.25]}}
GUARDED = {"repeat": 3, "disturb": "ood:0.5", "method": "tsd:guard=true"}


def runs(**values: Any) -> list[Run]:
    return make_sweep(values).runs()


def one(**values: Any) -> Run:
    (run,) = runs(**{"target": "hand", "seed": 0, "method": "tsd"} | values)
    return run


def folder(root: Path, *domains: str) -> Path:
    """Two classes with one image each."""
    for domain in domains:
        for i, name in enumerate(("cat", "dog")):
            (root / domain / name).mkdir(parents=True)
            Image.fromarray(np.full((8, 8, 3), 40 * i, dtype=np.uint8)).save(root / domain / name / "0.png")
    return root


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
    assert [run.method for run in found[:9]] == list(PAPER)
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
        with pytest.raises(ValueError, match=f"disturb='{disturb}' makes no sense here: fundus-sim has masks"):
            runs(**values, disturb=disturb)
    assert runs(**values, disturb="ood:0.1")[0].disturb == "ood:0.1"


def test_a_model_from_elsewhere_needs_no_other_domain(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"model")
    values = {"dataset": "folder", "root": str(folder(tmp_path / "mine", "a")), "seed": 0, "method": "bn"}
    with pytest.raises(ValueError, match="leave at least one to train on"):
        runs(**values)
    (run,) = runs(**values, checkpoint=str(tmp_path / "model.pt"))
    assert run.target == "a"


# Numbers and words as YAML has them


def test_yaml_reads_small_numbers(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "target: hand\nseed: [0, 1]\ntraining: {lr: 1e-3, iterations: 20}\n"
        "method:\n  - source\n  - tsd: {lr: 1e-5, per_class: none}\n  - t3a: {per_class: ~}\n"
    )
    found = read_sweep(file, {"seed": 1}).runs()
    assert [run.method for run in found] == ["source", "tsd", "t3a"]
    assert {run.seed for run in found} == {1}
    assert (found[1].hyper["lr"], found[1].hyper["per_class"], found[2].hyper["per_class"]) == (1e-5, None, None)
    assert isinstance(found[0].source, Training)
    assert (found[0].source.lr, found[0].source.iterations) == (1e-3, 20)


def test_params_none_is_a_keyword_not_nothing() -> None:
    assert one(method={"tent": {"params": "none"}}).hyper["params"] == "none"


def test_augment_none_can_be_said() -> None:
    assert one(training={"augment": "none"}) == one()


def test_stream_options_may_be_small_numbers(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("target: hand\nseed: 0\nmethod: bn\nstream: dirichlet\nstream_options: {concentration: 1e-2}\n")
    (run,) = read_sweep(file, {}).runs()
    assert run.stream_options == {"concentration": 0.01}


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "digits", "dataset: [digits\n", "\0"])
def test_file_without_settings_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"mine\.yaml (must hold settings|cannot be read)"):
        read_sweep(tmp_path / "mine.yaml", {})


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.yaml cannot be read"):
        read_sweep(tmp_path / "gone.yaml", {})


# What is refused


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"taget": "hand"}, "'taget'.* Did you mean 'target'"),
        ({"seeds": 0}, "'seeds'.* Did you mean 'seed'"),
        ({"training": {"iteration": 5}}, "'iteration'.* Did you mean 'iterations'"),
        ({"training": {"learning_rate": 5}}, "'learning_rate'.* There are: algorithm, iterations"),
        ({"dataset": "digit"}, "'digit'.* Did you mean 'digits'"),
        ({"target": "hamd"}, "'hamd'.* Did you mean 'hand'"),
        ({"target": ["hand", "type+noen"]}, "'noen'.* Did you mean 'neon'"),
        ({"dataset": "digits-c", "target": "frog-3"}, "'frog'.* Did you mean '(fog|frost)'"),
        ({"method": "tsdd"}, "'tsdd'.* Did you mean 'tsd'"),
        ({"method": {"tsd": {"neigbors": 1}}}, "'neigbors'; did you mean 'neighbors'"),
        ({"method": {"source": {"lr": 1}}}, "source has no hyper-parameter 'lr'"),
        ({"select": "sourse"}, "'sourse'"),
    ],
)
def test_unknown_name_is_refused_with_the_right_one(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runs(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stream": "idd"}, "'idd'.* 'iid'"),
        ({"stream": "dirichlet", "stream_options": {"concentrate": 1}}, "'concentrate'.* 'concentration'"),
        ({"network": "digitsnet"}, "'digitsnet'.* 'digits-net'"),
        ({"dataset": "digits-c", "target": "fog-9"}, "fog-9"),
        ({"target": "hand+neon", "stream": "iid"}, "iid takes one domain"),
        ({"target": "hand+type+poster+neon", "stream": "mixed"}, "leave at least one"),
    ],
)
def test_mistake_that_would_fail_every_run_is_found_before_anything_starts(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        runs(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": -1}, "seed.*greater than or equal to 0.*-1"),
        ({"seed": 1.5}, "seed.*1.5"),
        ({"seed": "one"}, "seed.*'one'"),
        ({"seed": []}, "seed"),
        ({"batch": 0}, "batch.*0"),
        ({"limit": 0}, "limit.*0"),
        ({"reset": "perhaps"}, "reset.*'perhaps'"),
        ({"dataset": []}, "dataset"),
        ({"dataset": {"digits": 1}}, "dataset"),
        ({"method": []}, "method"),
        ({"method": 5}, "a method is a name, or `name: {lr: 0.001}`, not 5"),
        ({"method": {"tsd": None}}, "write hyper-parameters as `tsd: {lr: 0.001}`, not None"),
        ({"method": {"tsd": {}, "tent": {}}}, "a method is a name"),
        ({"method": {"tsd": {"lr": -1}}}, "lr=-1"),
        ({"method": {"tsd": {"lr": "fast"}}}, "lr='fast'"),
        ({"method": {"tsd": {"lr": "nan"}}}, "lr=nan"),
        ({"method": {"tsd": {"per_class": 0}}}, "per_class=0"),
        ({"stream_options": 3}, "stream_options.*3"),
        ({"training": {"lr": -1}}, "lr.*-1"),
        ({"training": {"algorithm": "magic"}}, "algorithm.*'magic'"),
        ({"training": {"decay_at": [0.9, 0.1]}}, "decay_at must be rising"),
        ({"training": "fast"}, "training.*'fast'"),
        ({"training": 5}, "training.*5"),
        ({"dataset": "pacs"}, "pacs is not embedded: give its folder"),
        ({"dataset": "pacs", "root": "/does/not/exist"}, "/does/not/exist is not a folder"),
        ({"weights": "/does/not/exist.pt"}, "/does/not/exist.pt"),
        ({"checkpoint": "/does/not/{target}.pt"}, "/does/not/hand.pt"),
        ({"checkpoint": "/does/not/{domain}.pt"}, "domain"),
    ],
)
def test_wrong_value_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        runs(**values)


@pytest.mark.parametrize("values", [{"training": {"lr": -1}}, {"training": {"decay_at": [0.9, 0.1]}}])
def test_wrong_value_of_training_is_named_with_its_group(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^training"):
        make_sweep(values)


# Files of weights


def test_weights_file_is_its_hash_not_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.pt"
    file.write_bytes(b"weights")
    sweep = make_sweep({"target": "hand", "seed": 0, "method": "bn", "weights": str(file)})
    (run,) = sweep.runs()
    assert run.weights == "sha256:" + hashlib.sha256(b"weights").hexdigest()[:16]
    assert str(tmp_path) not in run.model_dump_json()
    assert sweep.file_of(run) == str(file)
    file.write_bytes(b"others")
    assert sweep.runs()[0].digest() != run.digest()


def test_checkpoints_are_filled_in_for_target_and_seed(tmp_path: Path) -> None:
    for target in ("hand", "hand+neon"):
        for seed in (0, 1):
            (tmp_path / f"{target}-{seed}.pt").write_bytes(f"{target} {seed}".encode())
    sweep = make_sweep(
        {"target": ["hand", "hand+neon"], "seed": [0, 1], "method": "bn", "stream": "mixed"}
        | {"checkpoint": f"{tmp_path}/{{target}}-{{seed}}.pt"}
    )
    found = sweep.runs()
    assert len(found) == 4
    for run in found:
        content = f"{run.target} {run.seed}".encode()
        expected = "sha256:" + hashlib.sha256(content).hexdigest()[:16]
        assert run.source == Given(checkpoint=expected, size=32, normalize="half")
        assert sweep.file_of(run) == str(tmp_path / f"{run.target}-{run.seed}.pt")
        assert run.recipe(open_dataset("digits")) is None
        assert str(tmp_path) not in run.model_dump_json()


# Which runs are the same


def test_id_of_a_run_never_changes() -> None:
    assert one().digest() == "68b1644e43b19a59"
    assert one(training={"multilabel": False}).digest() == "68b1644e43b19a59"
    assert "multilabel" not in one().model_dump(mode="json")["source"]
    assert not {"guard", "repeat", "disturb"} & set(one(repeat=1, disturb="").model_dump(mode="json"))
    assert one(repeat=1, disturb="", method="tsd:guard=false").digest() == "68b1644e43b19a59"


def test_id_changes_with_every_setting() -> None:
    run, given = one(), Given(checkpoint="sha256:0")
    others: dict[str, Any] = {
        "dataset": "x", "data": "x", "target": "x", "network": "x", "weights": "x", "source": given, "method": "x",
        "code": {"method": "x"}, "hyper": run.hyper | {"lr": 1e-3}, "seed": 1, "stream": "mixed",
        "stream_options": {"slots": 1}, "batch": 1, "limit": 1, "reset": True, "select": "source",
        "guard": True, "repeat": 2, "disturb": "nan",
    }  # fmt: skip
    assert set(others) == set(Run.model_fields)
    found = {run.model_copy(update={name: value}).digest() for name, value in others.items()}
    assert len(found | {run.digest()}) == len(others) + 1


def test_id_changes_with_every_setting_of_training() -> None:
    run = one()
    assert isinstance(run.source, Training)
    others: dict[str, Any] = {
        "algorithm": "swad", "iterations": 1, "batch": 1, "lr": 1.0, "optimizer": "sgd", "weight_decay": 1.0,
        "decay_at": (0.5,), "augment": "shift", "normalize": "imagenet", "size": 8, "holdout": 0.5, "every": 1,
        "first": 1, "converge": 1, "tolerate": 1, "tolerance": 1.0, "refresh": 1,
        "multilabel": True, "resize": "crop", "range": (0, 4095), "grey": True,
    }  # fmt: skip
    assert set(others) == set(Training.model_fields)
    found = {
        run.model_copy(update={"source": run.source.model_copy(update={name: value})}).digest()
        for name, value in others.items()
    }
    assert len(found | {run.digest()}) == len(others) + 1


@pytest.mark.parametrize("values", [{}, {"select": "source"}, {"training": {"decay_at": [0.5, 0.75]}}, GREY, GUARDED])
def test_run_comes_back_from_its_record(values: dict[str, Any]) -> None:
    run = one(**values)
    assert Run(**run.model_dump(mode="json")) == run
    assert Run(**run.model_dump(mode="json")).digest() == run.digest()


@pytest.mark.parametrize("method", PAPER)
def test_all_hyper_parameters_are_in_the_settings(method: str) -> None:
    usual = {"search": "exact"} if method == "tsd" else {}  # said only where it is not so
    assert one(method=method).hyper | usual == get_method(method)().hyperparameters()
    assert {"norm", "episodic"} <= set(one(method=method).hyper)


def test_a_hyper_parameter_that_came_later_leaves_older_runs_their_names() -> None:
    assert "search" not in one(method="tsd:search=exact").hyper
    assert one(method="tsd:search=sketch").hyper == one().hyper | {"search": "sketch"}
    assert one(method="tsd:search=sketch").digest() != one(method="tsd:search=exact").digest() == one().digest()


@pytest.mark.parametrize("method", [*PAPER, "eata"])
def test_default_that_is_given_is_the_same_run(method: str) -> None:
    for name, value in get_method(method)().hyperparameters().items():
        assert one(method={method: {name: value}}).digest() == one(method=method).digest()


@pytest.mark.parametrize(
    ("method", "hyper"),
    [("eata", {"fisher_weight": 2000}), ("tsd", {"variant": "released", "alignment": 0}), ("eta", {"momentum": "1"})],
)
def test_whole_number_for_a_fraction_is_the_same_run(method: str, hyper: dict[str, Any]) -> None:
    as_fraction = {key: value if key == "variant" else float(value) for key, value in hyper.items()}
    assert one(method={method: hyper}).digest() == one(method={method: as_fraction}).digest()


def test_both_modes_of_statistics_are_runs_of_their_own() -> None:
    found = runs(target="hand", seed=0, method=[{m: {"norm": n}} for m in ("tsd", "lame") for n in ("source", "batch")])
    assert [(run.method, run.hyper["norm"]) for run in found] == [
        ("tsd", "source"), ("tsd", "batch"), ("lame", "source"), ("lame", "batch"),
    ]  # fmt: skip


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
    (run,) = read_sweep(tmp_path / "s.yaml", {"training": {"lr": 0.5}}).runs()
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
    with pytest.raises(ValueError, match="cannot go with a checkpoint"):
        runs(checkpoint=str(tmp_path / "model.pt"), select="source")
    with pytest.raises(ValueError, match="names a domain twice"):
        runs(target="hand+hand", stream="mixed")
