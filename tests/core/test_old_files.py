"""Files that an older version has written still load, and what they hold goes on as it did; see tests/old_states.py."""

import json
from pathlib import Path

import pytest
import torch
from old_states import CASES, FOLDER, RECIPE, REPORT, classifier, segmenter, write
from safetensors import safe_open
from safetensors.torch import load_file

import trueup
from trueup.source.checkpoints import Store, load_model, read_checkpoint


def header(name: str) -> dict[str, object]:
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        return json.loads(file.metadata()["header"])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("built", [False, True])
def test_an_old_state_goes_on_as_it_did(name: str, built: bool) -> None:
    case = CASES[name]
    adapter = case.adapter()
    if built:
        adapter(case.stream(40, 41)[0])
    adapter.load(FOLDER / f"{name}.safetensors")
    assert (adapter.batches, adapter.images) == (case.batches, case.batches * case.size)
    assert adapter.updates == header(name)["updates"] > 0
    expected = load_file(FOLDER / f"{name}-answers.safetensors")
    for i, x in enumerate(case.stream(case.batches, case.batches + 2)):
        torch.testing.assert_close(adapter(x), expected[str(i)])
    assert adapter.batches == case.batches + 2


def test_an_old_state_is_taken_up_from_a_folder(tmp_path: Path) -> None:
    case = CASES["tent-guard"]
    (tmp_path / "state-0000000007.safetensors").write_bytes((FOLDER / "tent-guard.safetensors").read_bytes())
    adapter = case.adapter()
    assert adapter.checkpoint(tmp_path, every=1) == case.batches
    x = case.stream(case.batches, case.batches + 1)[0]
    torch.testing.assert_close(adapter(x), load_file(FOLDER / "tent-guard-answers.safetensors")["0"])


def test_the_states_hold_what_can_change_in_a_file() -> None:
    """Kept good states, how images were normalised, a memory, estimates of the policy, an optimiser."""
    names = {name: set(load_file(FOLDER / f"{name}.safetensors")) for name in CASES}
    parts = {name: {each.partition("/")[0] for each in found} for name, found in names.items()}
    assert parts["tent-guard"] >= {"net", "optimizer", "watch", "kept0", "kept1"}
    assert header("tent-guard")["pixels"]
    assert parts["tsd-plain"] >= {"net", "state", "optimizer"}
    assert parts["rotta-safe"] >= {"net", "state", "policy", "optimizer", "random", "watch"}
    assert parts["masks-safe"] >= {"net", "state", "policy", "optimizer", "random", "watch"}
    assert header("masks-safe")["task"] == "segmentation"


@pytest.mark.parametrize(("name", "other"), [("tent-guard", "tsd-plain"), ("rotta-safe", "tsd-plain")])
def test_an_old_state_of_another_adapter_is_refused(name: str, other: str) -> None:
    adapter = CASES[other].adapter()
    with pytest.raises(ValueError, match=f"{name}.safetensors"):
        adapter.load(FOLDER / f"{name}.safetensors")


def test_an_old_state_of_another_model_is_refused() -> None:
    model = classifier()
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(ValueError, match="source model"):
        trueup.adapt(model, "tsd", lr=0.001).load(FOLDER / "tsd-plain.safetensors")


def test_an_old_checkpoint_loads() -> None:
    """Its name is the hash of its recipe, so that must not move either."""
    path = FOLDER / "made-up-old-states-classifier-erm-a064313e514d3653.safetensors"
    assert Store(FOLDER).path(RECIPE) == path
    model, report = Store(FOLDER).load(RECIPE)
    assert report == REPORT
    expected = classifier().state_dict()
    for loaded in (model, read_checkpoint(path, RECIPE.network)[0], load_model(path, RECIPE.network, 4, 8)):
        assert loaded.state_dict().keys() == expected.keys()
        assert all(torch.equal(t, expected[name]) for name, t in loaded.state_dict().items())


def test_files_are_still_written_as_they_were(tmp_path: Path) -> None:
    """The same files, and in them the same names, dtypes and shapes of tensors."""
    write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in FOLDER.iterdir()}
    for path in sorted(FOLDER.iterdir()):
        ours, theirs = load_file(tmp_path / path.name), load_file(path)
        assert {n: (t.dtype, t.shape) for n, t in ours.items()} == {n: (t.dtype, t.shape) for n, t in theirs.items()}


def test_models_do_not_depend_on_the_machine() -> None:
    """A state is refused by a model that differs in one bit."""
    for model in (classifier(), segmenter()):
        values = torch.cat([t.flatten() for t in model.state_dict().values()]) * 1024
        assert torch.equal(values, values.round())
        assert len(values.unique()) > 50
