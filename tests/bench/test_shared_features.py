"""Methods that share a pass of the backbone give the same answers as those that run their own."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_streams import FROZEN, Seen, by_hand, domain, net, same, toy_runner

import trueup
from trueup.bench import stream_runner as protocol
from trueup.core.method import Info, Method
from trueup.core.registry import make_method
from trueup.model.split_model import Output, SplitModel


def counted(sizes: list[int]) -> nn.Module:
    """The network, noting the sizes of the batches that it sees. The probe for its head takes two images."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2:
                sizes.append(len(x))
            answer: Tensor = self.body(x)
            return answer

    return Counted().eval()


@pytest.mark.parametrize(("name", "norm"), FROZEN)
def test_shared_features_give_the_same_answers_to_the_bit(name: str, norm: str, seen: Seen) -> None:
    runner, method = toy_runner(domain(41, seed=1)), make_method(name, {"norm": norm})
    with_others = runner.run(method)
    alone = runner.run(method, share=False)
    assert same(seen[0], seen[1])
    assert with_others.results == alone.results


@pytest.mark.parametrize(("name", "norm"), FROZEN)
def test_shared_features_give_the_same_answers_when_domains_are_reset(name: str, norm: str, seen: Seen) -> None:
    runner = toy_runner(domain(21, seed=1), domain(20, seed=2), reset=True)
    runner.run(make_method(name, {"norm": norm}))
    runner.run(make_method(name, {"norm": norm}), share=False)
    assert same(seen[0], seen[1])


def test_backbone_runs_once_for_each_mode_of_statistics() -> None:
    sizes: list[int] = []
    runner = toy_runner(domain(41, seed=1), model=counted(sizes))
    for name, norm in FROZEN:
        runner.run(make_method(name, {"norm": norm}))
    assert sizes == [16, 16, 16, 9, 16, 16, 9]  # the first is to get warm


def test_time_of_the_shared_pass_is_part_of_every_methods_cost() -> None:
    runner = toy_runner(domain(41, seed=1))
    costs = [runner.run(make_method(name, {})).cost["seconds"] for name in ("source", "t3a")]
    shared = runner.passes["source"]
    assert shared is not None
    assert min(costs) > shared.seconds > 0


@pytest.mark.parametrize("bias", [True, False])
def test_head_without_bias_is_shared_too(bias: bool, seen: Seen) -> None:
    model = net()
    if not bias:
        model.get_submodule("head").bias = None
    runner = toy_runner(domain(41, seed=1), model=model)
    runner.run(make_method("t3a", {}))
    runner.run(make_method("t3a", {}), share=False)
    assert same(seen[0], seen[1])
    assert runner.passes["source"] is not None


class Cosine(nn.Linear):
    """A head of its own kind: cosine similarities at a temperature."""

    def forward(self, x: Tensor) -> Tensor:
        return 8 * F.linear(F.normalize(x, p=2, dim=1), F.normalize(self.weight, p=2, dim=1))


@pytest.mark.parametrize("name", ["source", "t3a", "lame"])
def test_head_of_another_kind_gives_the_same_answers_shared_or_not(name: str, seen: Seen) -> None:
    model = net()
    head = Cosine(24, 6)
    head.load_state_dict(model.get_submodule("head").state_dict())
    model.head = head
    runner = toy_runner(domain(41, seed=1), model=model)
    runner.run(make_method(name, {}))
    runner.run(make_method(name, {}), share=False)
    assert same(seen[0], seen[1])


@pytest.mark.parametrize("name", ["tent", "pl", "shot-im", "eta", "eata", "tsd"])
def test_gradient_methods_do_not_share(name: str) -> None:
    runner = toy_runner(domain(41, seed=1))
    assert runner.shared(make_method(name, {"norm": "source"})) is None
    assert runner.passes == {}


@pytest.mark.parametrize("name", ["source", "bn", "t3a", "lame"])
def test_running_estimates_are_not_shared(name: str, seen: Seen) -> None:
    runner, method = toy_runner(domain(41, seed=1)), make_method(name, {"norm": "ema"})
    assert runner.shared(method) is None
    runner.run(method)
    assert same(seen[0], by_hand(trueup.adapt(net(), method), runner.loader.place, runner.stream))


def test_model_without_a_head_does_without_sharing(seen: Seen) -> None:
    model = nn.Sequential(net(), nn.Softplus())
    runner = toy_runner(domain(41, seed=1), model=model)
    runner.run(make_method("source", {}))
    assert runner.passes == {"source": None}
    assert same(seen[0], by_hand(trueup.adapt(model, "source"), runner.loader.place, runner.stream))


def test_too_many_features_are_not_kept(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    runner = toy_runner(domain(41, seed=1))
    monkeypatch.setattr(protocol, "SHARED", 41 * protocol.WIDEST * 4 - 1)
    runner.run(make_method("t3a", {}))
    assert runner.passes == {"source": None}
    runner.passes.clear()
    monkeypatch.setattr(protocol, "SHARED", 41 * protocol.WIDEST * 4)
    runner.run(make_method("t3a", {}))
    assert runner.passes["source"] is not None
    assert same(seen[0], seen[1])


@dataclass(frozen=True, kw_only=True)
class Views(Method):
    """Asks the model about mirrored images, too."""

    info = Info(name="views", title="Views", paper="none")

    def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
        return out.logits + net(out.x.flip(-1)).logits


@dataclass(frozen=True, kw_only=True)
class Again(Method):
    """Its own forward pass."""

    info = Info(name="again", title="Again", paper="none")

    def forward(self, net: SplitModel, x: Tensor, state: nn.Module) -> Output:
        return net(x.flip(-1), update=True)


@dataclass(frozen=True, kw_only=True)
class Single(Method):
    """Image by image."""

    norm: str = "batch"
    info = Info(name="single", title="Single", paper="none")

    def rows(self, state: Any, n: int) -> int:
        return 1


@pytest.mark.parametrize("method", [Views(), Again(), Single()], ids=["views", "forward", "rows"])
def test_method_that_looks_at_images_gets_images(method: Method, seen: Seen) -> None:
    runner = toy_runner(domain(41, seed=1))
    runner.run(method)
    assert same(seen[0], by_hand(trueup.adapt(net(), method), runner.loader.place, runner.stream))


def test_method_that_answers_with_nan_fails_instead_of_being_measured() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Nan(Method):
        info = Info(name="nan", title="Nan", paper="none")

        def predict(self, net: SplitModel, out: Output, state: Any) -> Tensor:
            return out.logits * torch.nan

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="finite"):
            toy_runner(domain(41, seed=1)).run(Nan())


def test_a_head_that_does_not_explain_the_logits_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = toy_runner(domain(41, seed=1))
    alone = runner.run(make_method("t3a", {}), share=False).results
    monkeypatch.setattr(protocol, "_head", lambda adapter: nn.Linear(24, 6))
    assert runner.run(make_method("t3a", {})).results == alone
    assert runner.passes == {"source": None}


@pytest.mark.parametrize(("layer", "words"), [(nn.Identity, ["bn changes nothing"]), (None, [])], ids=["none", "bn"])
def test_bn_is_said_to_change_nothing_only_if_the_whole_model_has_no_statistics(
    layer: type[nn.Module] | None, words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    for name, module in [*model.named_modules()] if layer else ():
        if isinstance(module, nn.BatchNorm2d):
            model.set_submodule(name, layer())
    runner = toy_runner(domain(41, seed=1), model=model)
    runner.run(make_method("bn", {}))
    assert runner.passes["batch"] is not None
    assert [record.getMessage()[:18] for record in caplog.records] == words
