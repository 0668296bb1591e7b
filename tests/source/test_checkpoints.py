"""Source models on disk: what a file holds, which files are refused, and in what words."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from trueup.core import files
from trueup.source.checkpoints import Store, describe_given, digest_of_file, load_model, read_checkpoint, read_header
from trueup.source.external_checkpoints import take_prefix
from trueup.source.networks import build_network
from trueup.source.recipe import GivenModel, Recipe, Training

RECIPE = Recipe(dataset="made-up", sources=("a",), classes=3, network="digits-net", training=Training(size=8))
REPORT = {"history": [{"iteration": 1, "accuracy": 0.5, "loss": 1.25}], "kept": {"accuracy": 0.5}, "broken": ["ü.png"]}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "not" / "there")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(5)
    return build_network("digits-net", 3)


def same(a: nn.Module, b: nn.Module) -> bool:
    mine, yours = a.state_dict(), b.state_dict()
    return mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)


def test_a_model_comes_back_with_its_report(store: Store, model: nn.Module) -> None:
    assert not store.has(RECIPE)
    store.save(RECIPE, model, REPORT)
    assert store.has(RECIPE)
    loaded, report = store.load(RECIPE)
    assert same(loaded, model)
    assert report == REPORT
    assert not loaded.training


def test_the_file_is_called_by_the_recipe_and_lies_alone(store: Store, model: nn.Module) -> None:
    store.save(RECIPE, model, REPORT)
    assert [file.name for file in store.folder.iterdir()] == [f"{RECIPE.name}.safetensors"]
    assert store.path(RECIPE) != store.partial(RECIPE)


def test_the_file_is_plain_safetensors_with_the_recipe_inside(store: Store, model: nn.Module) -> None:
    store.save(RECIPE, model, REPORT)
    with safe_open(store.path(RECIPE), "pt") as file:
        header = json.loads(file.metadata()["header"])
        assert set(file.keys()) == set(model.state_dict())
    assert Recipe(**header["recipe"]) == RECIPE
    assert header["report"] == REPORT
    assert read_header(store.path(RECIPE)) == header


def test_a_model_with_channels_last_is_kept_by_its_values(store: Store, model: nn.Module) -> None:
    store.save(RECIPE, model.to(memory_format=torch.channels_last), REPORT)
    assert same(store.load(RECIPE)[0], model)


def test_the_model_of_another_recipe_is_refused(store: Store, model: nn.Module) -> None:
    store.save(RECIPE, model, REPORT)
    other = RECIPE.model_copy(update={"seed": 1})
    store.path(RECIPE).rename(store.path(other))
    with pytest.raises(ValueError, match=f"{re.escape(store.path(other).name)} holds the model of another recipe; del"):
        store.load(other)


def test_every_flipped_byte_is_found(store: Store, model: nn.Module) -> None:
    store.save(RECIPE, model, REPORT)
    blob = store.path(RECIPE).read_bytes()
    for at in (0, 8, 100, len(blob) // 2, len(blob) - 1):
        store.path(RECIPE).write_bytes(blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :])
        with pytest.raises(ValueError, match=re.escape(store.path(RECIPE).name)):
            store.load(RECIPE)


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_file_that_was_cut_off_is_named(length: int, store: Store, model: nn.Module) -> None:
    store.save(RECIPE, model, REPORT)
    store.path(RECIPE).write_bytes(store.path(RECIPE).read_bytes()[:length])
    with pytest.raises(ValueError, match=f"{re.escape(store.path(RECIPE).name)} .*cut off"):
        store.load(RECIPE)
    with pytest.raises(ValueError, match=f"{re.escape(store.path(RECIPE).name)} .*cut off"):
        load_model(store.path(RECIPE), "digits-net", 3, 8)


def test_a_network_that_has_changed_since_is_named(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own function may give other layers today: torch's bare error names neither the file nor the way out."""
    recipe = RECIPE.model_copy(update={"network": "changing:net"})
    monkeypatch.chdir(tmp_path)
    Path("changing.py").write_text("import torch\nwide = 4\ndef net(n): return torch.nn.Linear(wide, n)\n")
    store.save(recipe, build_network("changing:net", 3), REPORT)
    monkeypatch.setattr("changing.wide", 5)
    with pytest.raises(ValueError, match=re.escape(store.path(recipe).name)):
        store.load(recipe)


# Any file


def test_our_own_file_loads(store: Store, model: nn.Module) -> None:
    store.save(RECIPE, model, REPORT)
    loaded = load_model(store.path(RECIPE), RECIPE.network, 3, 224)
    assert same(loaded, model)
    assert not loaded.training


def test_our_own_file_with_another_network_is_refused(store: Store, model: nn.Module) -> None:
    """A record would name a network that was not there."""
    store.save(RECIPE, model, REPORT)
    with pytest.raises(ValueError, match=f"is a {RECIPE.network}, not a resnet18"):
        load_model(store.path(RECIPE), "resnet18", 3, 224)


def test_our_own_file_may_not_have_seen_the_target(store: Store, model: nn.Module) -> None:
    store.save(RECIPE, model, REPORT)
    seen = RECIPE.sources[0]
    with pytest.raises(ValueError, match=f"was trained on {seen}, which cannot be a target"):
        describe_given(store.path(RECIPE), ["elsewhere", seen], RECIPE.dataset, Training(normalize="half"))
    said = describe_given(
        store.path(RECIPE), ["elsewhere"], RECIPE.dataset, Training(normalize="half", multilabel=True)
    )
    assert (said.recipe, said.sources) == (RECIPE.digest(), RECIPE.sources)
    assert (said.size, said.normalize, said.multilabel) == (8, "imagenet", False)  # what the file says


def test_our_own_file_may_have_seen_a_namesake_in_another_dataset(store: Store, model: nn.Module) -> None:
    store.save(RECIPE, model, REPORT)
    assert describe_given(store.path(RECIPE), [RECIPE.sources[0]], "other", Training()).recipe == RECIPE.digest()


@pytest.mark.parametrize(("source", "target"), [("a:all", "a"), ("a:all", "a:test"), ("a", "a:test")])
def test_a_part_of_what_a_model_has_seen_is_no_target_for_it(
    source: str, target: str, store: Store, model: nn.Module
) -> None:
    recipe = RECIPE.model_copy(update={"sources": (source,)})
    store.save(recipe, model, REPORT)
    with pytest.raises(ValueError, match=f"was trained on {target}, which cannot be a target"):
        describe_given(store.path(recipe), [target], recipe.dataset, Training())


def test_our_own_file_says_whether_its_outputs_are_labels(store: Store, model: nn.Module) -> None:
    recipe = RECIPE.model_copy(update={"training": Training(size=8, multilabel=True)})
    store.save(recipe, model, REPORT)
    assert describe_given(store.path(recipe), ["b"], recipe.dataset, Training()).multilabel


@pytest.mark.parametrize("multilabel", [False, True])
def test_somebody_elses_file_is_seen_as_the_settings_say(multilabel: bool, model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "plain.pt"
    torch.save(model.state_dict(), path)
    said = describe_given(path, ["a"], RECIPE.dataset, Training(size=16, normalize="half", multilabel=multilabel))
    expected = "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert said == GivenModel(checkpoint=expected, size=16, normalize="half", multilabel=multilabel)


def test_our_own_file_with_other_classes_is_refused(store: Store, model: nn.Module) -> None:
    store.save(RECIPE, model, REPORT)
    with pytest.raises(ValueError, match="safetensors has 3 classes; the dataset has 7"):
        load_model(store.path(RECIPE), "digits-net", 7, 8)


@pytest.mark.parametrize("file", ["plain.pt", "plain.safetensors", "described.safetensors"])
def test_a_plain_state_dict_loads(file: str, model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / file
    if file == "plain.pt":
        torch.save(model.state_dict(), path)
    else:
        save_file(model.state_dict(), path, {"format": "pt"} if file.startswith("described") else None)
    loaded = load_model(str(path), "digits-net", 3, 8)
    assert same(loaded, model)
    assert not loaded.training


def test_a_plain_state_dict_with_other_classes_is_refused(model: nn.Module, tmp_path: Path) -> None:
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    with pytest.raises(ValueError, match=r"plain.pt does not fit the model: head.weight is \(3, 128\)"):
        load_model(tmp_path / "plain.pt", "digits-net", 7, 8)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.pt is not a file"):
        load_model(tmp_path / "none.pt", "digits-net", 3, 8)


def test_the_state_of_an_adapter_is_no_source_model(tmp_path: Path) -> None:
    files.write(tmp_path / "a.safetensors", {"x": torch.ones(1)}, {}, "adapter")
    with pytest.raises(ValueError, match="has the format 'trueup-adapter-1'"):
        load_model(tmp_path / "a.safetensors", "digits-net", 3, 8)


def test_an_unfinished_training_is_no_model(store: Store, model: nn.Module) -> None:
    """A user who takes the wrong one of two files is told so, and not by a bare error of torch."""
    store.folder.mkdir(parents=True)
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    files.write(store.partial(RECIPE), tensors, {"recipe": RECIPE.model_dump(mode="json"), "done": 3}, "source")
    for load in (read_checkpoint, lambda path: load_model(path, "digits-net", 3, 8)):
        with pytest.raises(ValueError, match="unfinished"):
            load(store.partial(RECIPE))


# Small things


def test_the_digest_of_a_file_is_the_beginning_of_its_sha256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert digest_of_file(tmp_path / "x") == "sha256:" + hashlib.sha256(b"abc").hexdigest()[:16]


def test_sets_of_tensors_come_apart_again() -> None:
    a, b = {"x": torch.ones(1), "model/x": torch.zeros(1)}, {"x": torch.zeros(2)}
    both = {"model/x": a["x"], "model/model/x": a["model/x"], "kept/x": b["x"]}
    assert take_prefix(both, "model/") == a
    assert take_prefix(both, "kept/") == b
    assert take_prefix(both, "swad/") == {}
