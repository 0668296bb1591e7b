"""States on disk."""

import json
import os
from pathlib import Path

import pytest
import torch
import torchvision
import warm

import trueup
from trueup.core import files
from trueup.testing import convnet, images

XS = [images(16, seed=i, shift=1.0)[0] for i in range(6)]


def adapted(method: str = "tsd", batches: int = 3, **hyper: object) -> trueup.Adapter:
    adapter = trueup.adapt(convnet(), method, **hyper)
    for x in XS[:batches]:
        adapter(x)
    return adapter


CONTINUE = """
import sys
sys.path.insert(0, sys.argv[2])
import conftest, torch, trueup
from trueup.testing import convnet, images
for method in trueup.list_methods():
    adapter = trueup.adapt(convnet(), method)
    adapter.load(f"{sys.argv[1]}/{method}.safetensors")
    answers = [adapter(images(16, seed=i, shift=1.0)[0]) for i in (3, 4, 5)]
    torch.save(answers, f"{sys.argv[1]}/{method}.pt")
"""


@pytest.mark.slow
def test_a_new_process_goes_on_to_the_bit(tmp_path: Path) -> None:
    adapters = {method: adapted(method) for method in trueup.list_methods()}
    for method, adapter in adapters.items():
        adapter.save(tmp_path / f"{method}.safetensors")
    warm.run("-c", CONTINUE, tmp_path, Path(__file__).parent.parent)
    for method, adapter in adapters.items():
        answers = torch.load(tmp_path / f"{method}.pt", weights_only=True)
        for x, answer in zip(XS[3:], answers, strict=True):
            assert torch.equal(adapter(x), answer), method


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    """Tent on a ResNet-18 changes 9,600 values: kilobytes, not 45 megabytes."""
    adapter = trueup.adapt(torchvision.models.resnet18(num_classes=7), "tent")
    adapter(torch.randn(4, 3, 32, 32))
    adapter.save(tmp_path / "tent.safetensors")
    assert (tmp_path / "tent.safetensors").stat().st_size < 200_000
    tensors, header = files.read(tmp_path / "tent.safetensors")
    assert sum(n.startswith("net/") for n in tensors) == 40
    assert header["method"] == "tent"
    assert header["version"] == trueup.__version__
    assert header["hyperparameters"]["lr"] == 1e-3


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    adapted("eta", 1).save(path)
    blob = path.read_bytes()
    victim = trueup.adapt(convnet(), "eta")
    for i in range(0, len(blob), 37):
        path.write_bytes(blob[:i] + bytes([blob[i] ^ (1 << i % 8)]) + blob[i + 1 :])
        with pytest.raises(ValueError, match="state"):
            victim.load(path)
    for cut in (0, 7, 8, 100, len(blob) - 1):
        path.write_bytes(blob[:cut])
        with pytest.raises(ValueError, match="state"):
            victim.load(path)
    path.write_bytes(blob)
    victim.load(path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: trueup.adapt(convnet(), "tent"), "another method: tsd, here tent"),
        (lambda: trueup.adapt(convnet(), "tsd", lr=1e-3), "other hyper-parameters"),
        (lambda: trueup.adapt(convnet(), "tsd", seed=1), "another seed"),
        (lambda: trueup.adapt(convnet(seed=1), "tsd"), "another source model"),
        (lambda: trueup.adapt(torchvision.models.resnet18(), "tsd"), "another source model"),
        (lambda: trueup.adapt(convnet(), "tsd", head="conv1"), "has the head 'head'"),
    ],
)
def test_foreign_states_are_refused_with_the_reason(other: object, message: str, tmp_path: Path) -> None:
    adapted().save(tmp_path / "state")
    with pytest.raises(ValueError, match=message):
        other().load(tmp_path / "state")


@pytest.mark.parametrize("classes", [5, 7])
def test_a_state_for_other_classes_is_refused(classes: int, tmp_path: Path) -> None:
    ours, theirs = (torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, c)) for c in (classes, 6))
    adapter = trueup.adapt(theirs, "tsd")
    adapter(torch.randn(9, 4))
    adapter.save(tmp_path / "state")
    with pytest.raises(ValueError, match="another source model"):
        trueup.adapt(ours, "tsd").load(tmp_path / "state")


def test_a_state_with_another_head_is_refused(tmp_path: Path) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x)

    model, x = Two(), torch.randn(6, 4)
    adapter = trueup.adapt(model, "t3a", head="a")
    adapter(x)
    adapter.save(tmp_path / "state")
    for example in (None, x):
        with pytest.raises(ValueError, match="has the head 'a', this adapter 'b'"):
            trueup.adapt(model, "t3a", head="b", example=example).load(tmp_path / "state")


def test_loading_under_inference_mode(tmp_path: Path) -> None:
    adapter = adapted()
    adapter.save(tmp_path / "state")
    with torch.inference_mode():
        other = trueup.adapt(convnet(), "tsd")
        other.load(tmp_path / "state")
    assert torch.equal(adapter(XS[3]), other(XS[3]))
    other.reset()
    assert torch.equal(other(XS[0]), adapted(batches=0)(XS[0]))


def test_functions_are_compared_by_what_they_select(tmp_path: Path) -> None:
    adapted("tsd", params=lambda name: "conv" in name).save(tmp_path / "state")
    trueup.adapt(convnet(), "tsd", params=lambda name: name.startswith("conv")).load(tmp_path / "state")
    with pytest.raises(ValueError, match="other parameters"):
        trueup.adapt(convnet(), "tsd", params=lambda name: "bn" in name).load(tmp_path / "state")


def test_other_files_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(3)}, tmp_path / "weights.safetensors")
    torch.save({"a": 1}, tmp_path / "pickle.pt")
    for name in ("weights.safetensors", "pickle.pt"):
        with pytest.raises(ValueError, match="is not a trueup state file"):
            trueup.adapt(convnet(), "tsd").load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        trueup.adapt(convnet(), "tsd").load(tmp_path / "missing")


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    metadata = {"format": "trueup-adapter-9", "sha256": "0" * 64, "header": json.dumps({})}
    save_file({"a": torch.zeros(1)}, tmp_path / "state", metadata)
    with pytest.raises(ValueError, match="'trueup-adapter-9'; this version reads 'trueup-adapter-1'"):
        trueup.adapt(convnet(), "tsd").load(tmp_path / "state")


def test_there_is_nothing_to_save_before_the_first_batch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="before the first batch"):
        trueup.adapt(convnet(), "tsd").save(tmp_path / "state")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapted()
    path = tmp_path / "state"
    adapter.save(path)
    before = path.read_bytes()
    adapter(XS[3])

    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        adapter.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_channels_last_goes_on_to_the_bit(tmp_path: Path) -> None:
    model = convnet().to(memory_format=torch.channels_last)
    adapter, other = trueup.adapt(model, "tsd"), trueup.adapt(model, "tsd")
    for x in XS[:3]:
        adapter(x)
    adapter.save(tmp_path / "state")
    other.load(tmp_path / "state")
    for x in XS[3:]:
        assert torch.equal(adapter(x), other(x))
