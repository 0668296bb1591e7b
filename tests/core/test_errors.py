"""Errors about models: what cannot be wrapped, whose error it is, and batches whose size a model fixes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import trueup
from trueup.model.calls import raised_by_model
from trueup.model.heads import HeadNotFoundError
from trueup.testing import convnet, images

X = images(16, seed=0, shift=1.0)[0]


# Models in a wrapper


def test_wrappers_for_several_devices_name_the_network_inside() -> None:
    parallel = nn.DataParallel(convnet())
    distributed = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(distributed)  # a real one needs a process group
    distributed.module = convnet()
    for model, name in ((parallel, "DataParallel"), (distributed, "DistributedDataParallel")):
        with pytest.raises(TypeError, match=rf"wrapped in {name}; pass the network inside it: model\.module"):
            trueup.adapt(model, "tent")
        with pytest.raises(TypeError, match=r"model\.module"):
            trueup.zero_shot(model, torch.randn(3, 4), scale=1.0)
        assert trueup.adapt(model.module, "tent")(X).isfinite().all()


def test_sharded_models_are_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(model)
    with pytest.raises(TypeError, match="sharded by FullyShardedDataParallel; load its full state dict"):
        trueup.adapt(model, "tent")


def test_ultralytics_engines_are_refused_before_they_start_a_training() -> None:
    class Model(nn.Module):
        """As `YOLO()`: train() starts a training."""

        def train(self, mode: bool = True) -> None:
            raise AssertionError("a training was started")

    Model.__module__ = "ultralytics.engine.model"

    class YOLO(Model):
        pass

    with pytest.raises(TypeError, match=r"model is ultralytics' YOLO, .*pass the network inside it, model\.model"):
        trueup.adapt(YOLO(), "tsd")

    class Inner(nn.Module):
        """As its classifiers answer in eval mode: probabilities and logits."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = convnet()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.inner(x)
            return logits.softmax(dim=1), logits

    way_out = trueup.adapt(Inner(), "tsd", output=lambda answer: answer[-1])
    torch.testing.assert_close(way_out(X), trueup.adapt(convnet(), "tsd")(X))


# The part that holds the logits


class Answering(nn.Module):
    """A network that answers in another form."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.form = convnet(), form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.inner(x))


@pytest.mark.parametrize(
    ("form", "name"),
    [(lambda y: {"scores": y}, "scores"), (lambda y: SimpleNamespace(y=y, logits=-y), "y"),
     (lambda y: {"logits": y, "out": -y}, "logits")],
    ids=["key", "attribute", "not the usual key"],
)  # fmt: skip
def test_output_may_name_the_part_that_holds_the_logits(form: Callable[[Tensor], Any], name: str) -> None:
    adapter = trueup.adapt(Answering(form), "tsd", output=name)
    plain = trueup.adapt(convnet(), "tsd")
    for _ in range(2):
        assert torch.equal(adapter(X), plain(X))
    assert adapter.net.head == "inner.head"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda y: y, r"output='logits': the model returned Tensor, which has no key or attribute"),
        (lambda y: {"a": y, "b": y}, r"output='logits': the model returned dict with a, b, which has no key"),
        (lambda y: (y, y), r"output='logits': the model returned tuple, which has no key or attribute"),
    ],
    ids=["tensor", "dict", "tuple"],
)
def test_a_part_that_is_not_there_is_refused(form: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*name another, or pass a function"):
        trueup.adapt(Answering(form), "tsd", output="logits")(X)


def test_output_that_is_neither_name_nor_function_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"output=3 must be a function .*or the name of the key or attribute"):
        trueup.adapt(convnet(), "tsd", output=3)


# Whose error it is


class Failing(nn.Module):
    """A network that does something before it answers."""

    def __init__(self, act: Callable[[Tensor], Any], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.act, self.inner = act, inner or convnet()

    def forward(self, x: Tensor) -> Tensor:
        self.act(x)
        return self.inner(x)


class LicenceError(RuntimeError):
    pass


def raising(error: Exception) -> Callable[[Tensor], Any]:
    def act(x: Tensor) -> None:
        raise error

    return act


def asserting(x: Tensor) -> None:
    assert x is None, "no licence"


@pytest.mark.parametrize(
    "act",
    [
        raising(RuntimeError("the licence server does not answer")),
        raising(LicenceError("wrong size of the licence")),
        raising(IndexError("no such expert")),
        raising(KeyError("stage")),
        asserting,
    ],
    ids=["RuntimeError", "a kind of its own", "IndexError", "KeyError", "assert"],
)
def test_an_error_of_the_model_is_passed_on_as_it_is(act: Callable[[Tensor], Any]) -> None:
    model = Failing(act)
    with pytest.raises(Exception) as own:  # noqa: PT011  (whatever it raises by itself)
        model(X)
    adapter = trueup.adapt(model, "tsd")
    with pytest.raises(type(own.value)) as seen:
        adapter(X)
    assert type(seen.value) is type(own.value)
    assert str(seen.value) == str(own.value)
    assert adapter.batches == 0


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x @ x.new_zeros(5, 5),
        lambda x: x.view(7, -1),
        lambda x: x[:, 9],
        lambda x: torch._assert(x.shape[1] == 1, "one channel"),
        raising(RuntimeError("Wrong input shape height=16, width=16. Expected a multiple of 32")),
    ],
    ids=["matmul", "view", "index", "torch._assert", "raised about the shape"],
)
def test_an_error_about_the_input_shows_the_input(act: Callable[[Tensor], Any]) -> None:
    adapter = trueup.adapt(Failing(act), "tsd")
    with pytest.raises(ValueError, match=r"the model cannot take images of shape \(3, 16, 16\), torch\.float32 on cpu"):
        adapter(X)


def test_networks_of_libraries_say_which_shape_they_cannot_take() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=64, num_classes=5)
    resnet = torchvision.models.resnet18(num_classes=5)
    for model, shape in ((vit, (3, 32, 32)), (resnet, (1, 32, 32))):
        with pytest.raises(ValueError, match=rf"cannot take images of shape \({shape[0]}, 32, 32\)"):
            trueup.adapt(model, "tent")(torch.randn(2, *shape))


def test_other_packages_that_begin_with_torch_are_not_torch() -> None:
    code = compile("def act():\n    raise RuntimeError('no licence')\n", torchvision.__file__, "exec")
    place: dict[str, Any] = {}
    exec(code, place)
    with pytest.raises(RuntimeError) as caught:
        place["act"]()
    assert raised_by_model(caught.value)
    assert not raised_by_model(RuntimeError("never raised"))


def test_an_error_later_in_the_stream_is_passed_on_too() -> None:
    expired = []

    def act(x: Tensor) -> None:
        if expired:
            raise RuntimeError("the licence has run out")

    adapter = trueup.adapt(Failing(act), "tsd")
    adapter(X)
    expired.append(True)
    with pytest.raises(RuntimeError, match=r"^the licence has run out$"):
        adapter(X)
    assert adapter.batches == 1


# Models that fix the size of a batch


def fixed(n: int, silent: bool) -> nn.Module:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = convnet()

        def forward(self, x: Tensor) -> Tensor:
            assert silent or len(x) == n, f"only batches of {n}"
            return self.inner(x.reshape(-1, *X.shape[1:])).reshape(n, -1)  # other numbers give rows of another length

    return Fixed()


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("method", ["tsd", "tent", "t3a", "bn"])
def test_models_that_fix_the_size_of_a_batch_are_probed_with_the_batch_as_it_comes(method: str, silent: bool) -> None:
    adapter, plain = trueup.adapt(fixed(16, silent), method), trueup.adapt(convnet(), method)
    for seed in range(2):
        x = images(16, seed=seed, shift=1.0)[0]
        torch.testing.assert_close(adapter(x), plain(x))
    assert adapter.net.head == "inner.head"


def test_exported_programs_of_one_size_run() -> None:
    exported = torch.export.export(convnet().eval(), (X,)).module()
    adapter, plain = trueup.adapt(exported, "source"), convnet().eval()
    with torch.no_grad():
        torch.testing.assert_close(adapter(X), plain(X))


def test_a_batch_of_another_size_is_the_models_error_and_changes_nothing() -> None:
    adapter = trueup.adapt(fixed(16, silent=False), "tsd")
    first = adapter(X)
    with pytest.raises(AssertionError, match="only batches of 16"):
        adapter(X[:5])
    assert adapter.batches == 1
    adapter.reset()
    assert torch.equal(adapter(X), first)


def test_a_model_without_a_head_that_fixes_the_size_says_so_not_the_size() -> None:
    adapter = trueup.adapt(nn.Sequential(fixed(16, silent=False), nn.Softplus()), "tsd")
    with pytest.raises(HeadNotFoundError, match="something follows it"):
        adapter(X)
