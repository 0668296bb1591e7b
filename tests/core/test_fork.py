"""Adapters of several streams over one backbone."""

import copy
import hashlib
from pathlib import Path

import pytest
import torch
from torch import nn

import trueup
from trueup.testing import convnet, images
from trueup.testing.case import play

XS = [images(16, seed=i, shift=1.0)[0] for i in range(4)]
YS = [images(16, seed=20 + i, shift=-1.0)[0] for i in range(4)]


def fixed(adapter: trueup.Adapter) -> dict[str, nn.Parameter]:
    return {n: p for n, p in adapter.net.model.named_parameters() if n not in adapter.net.selected}


def digest(adapter: trueup.Adapter) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in fixed(adapter).values())).hexdigest()


@pytest.mark.parametrize("method", ["tent", "tsd", "t3a", "cotta", "bn", "eta"])
def test_forks_go_their_own_ways(method: str) -> None:
    """Each stream is answered to the bit as by an adapter of its own, whatever the others see in between."""
    hyper = {"views": 2} if method == "cotta" else {}
    first = trueup.adapt(convnet(), method, example=XS[0], **hyper)
    second = first.fork()
    before = digest(first)
    found = [(first(x), second(y)) for x, y in zip(XS, YS, strict=True)]
    for at, stream in enumerate((XS, YS)):
        alone = play(trueup.adapt(convnet(), method, example=XS[0], **hyper), stream)
        assert all(torch.equal(pair[at], one) for pair, one in zip(found, alone, strict=True))
    assert digest(first) == digest(second) == before


def test_fixed_weights_are_one_piece_of_memory() -> None:
    first = trueup.adapt(convnet(), "tent", example=XS[0])
    forks = [first, *(first.fork() for _ in range(5))]
    for name in fixed(first):
        assert len({fork.net.model.get_parameter(name).data_ptr() for fork in forks}) == 1
    for name in (*first.net.selected, *dict(first.net.model.named_buffers())):
        places = {dict(fork.net.model.state_dict())[name].data_ptr() for fork in forks}
        assert len(places) == 6


def test_six_of_a_resnet50_cost_little_more_than_one() -> None:
    torchvision = pytest.importorskip("torchvision")
    first = trueup.adapt(torchvision.models.resnet50(num_classes=7), "tent", example=torch.zeros(2, 3, 32, 32))
    forks = [first, *(first.fork() for _ in range(5))]
    one, six = held([first]), held(forks)
    assert six <= 1.1 * one
    assert one > 90e6  # all weights of the network were counted


def held(adapters: list[trueup.Adapter]) -> int:
    """Bytes of all tensors that adapters hold, each piece of memory once."""
    pieces: dict[int, int] = {}
    for adapter in adapters:
        tensors = [*adapter.net.parameters(), *adapter.net.buffers(), *adapter.source.values()]
        tensors += [*adapter.state.parameters(), *adapter.state.buffers(), *adapter.fresh.memory.buffers()]
        assert adapter.optimizer is not None
        tensors += [v for s in adapter.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        pieces |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(pieces.values())


def test_one_may_move_reset_load_and_be_given_up(tmp_path: Path) -> None:
    first = trueup.adapt(convnet(), "tent", example=XS[0])
    play(first, XS[:2])
    first.save(tmp_path / "state")
    second, expected = first.fork(), copy.deepcopy(first)
    before = digest(first)
    second.double()
    second(YS[0].double())
    second.reset()
    third = first.fork()
    third.load(tmp_path / "state")
    third(YS[1])
    del third
    assert digest(first) == before
    assert next(iter(fixed(first).values())).dtype == torch.float32
    assert torch.equal(first(XS[2]), expected(XS[2]))


def test_a_fork_writes_to_no_folder_of_the_first(tmp_path: Path) -> None:
    first = trueup.adapt(convnet(), "tent", example=XS[0])
    first.checkpoint(tmp_path / "states", every=1)
    second = first.fork()
    second(YS[0])
    assert list((tmp_path / "states").glob("*.safetensors")) == []
    first(XS[0])
    assert len(list((tmp_path / "states").iterdir())) >= 1


def test_before_the_first_batch_there_is_nothing_to_share() -> None:
    with pytest.raises(ValueError, match="example=x"):
        trueup.adapt(convnet(), "tent").fork()


def test_a_state_is_loaded_without_ending_the_sharing(tmp_path: Path) -> None:
    first = trueup.adapt(convnet(), "tent", example=XS[0])
    first(XS[0])
    first.save(tmp_path / "state")
    second = first.fork()
    second.load(tmp_path / "state")
    for name, p in fixed(first).items():
        assert second.net.model.get_parameter(name).data_ptr() == p.data_ptr()
    with pytest.raises(TypeError, match=r"share weights.*load\(path\)"):
        second.load_state_dict(second.state_dict())


def test_teachers_share_what_they_never_change() -> None:
    first = trueup.adapt(convnet(), "rotta", every=8, example=XS[0])
    second = first.fork()
    assert second.state.teacher.model.conv0.weight.data_ptr() == first.state.teacher.model.conv0.weight.data_ptr()
    assert second.state.teacher.model.bn0.weight.data_ptr() != first.state.teacher.model.bn0.weight.data_ptr()
