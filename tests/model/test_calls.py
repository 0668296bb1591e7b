"""Calls with more than one tensor: keywords, dicts, companions of the images, bytes."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trueup
from trueup.model.calls import Batch, arguments, read_call
from trueup.testing import convnet, images

XS = [images(12, seed=i, shift=1.0)[0] for i in range(3)]
VIEWS = ["memo", "rotta", "cotta", "note", "roid", "deyo", "adacontrast"]
METHODS = sorted(trueup.list_methods("classification"))


class Named(nn.Module):
    """Takes its images by keyword alone, as models of transformers are called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()

    def forward(self, *, pixel_values: Tensor | None = None, scale: float = 1.0) -> dict[str, Tensor]:
        """Refuse other calls."""
        assert pixel_values is not None
        assert type(pixel_values) is Tensor
        return {"logits": scale * self.net(pixel_values)}


class Positional(nn.Module):
    """The same network, called with a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()

    def forward(self, x: Tensor) -> Tensor:
        """Answer one tensor."""
        return self.net(x)


class Pair(nn.Module):
    """Images and a map of weights for them, one for each; `gain` is the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()

    def forward(self, x: Tensor, weights: Tensor, gain: Tensor | float = 1.0) -> Tensor:
        """Weight the images, then answer."""
        assert len(x) == len(weights)
        return self.net(x * weights[:, None, None, None] * gain)


class Bytes(nn.Module):
    """Normalises bytes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()

    def forward(self, x: Tensor) -> Tensor:
        """Answer images of bytes."""
        assert x.dtype == torch.uint8
        return self.net((x.float() - 128) / 32)


class Mapped(nn.Module):
    """Takes a dict as its one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        """Answer what is in it."""
        return self.net(inputs["image"] + inputs["more"]["offset"])


def hyper(method: str) -> dict[str, Any]:
    return {"views": 2} if method in ("memo", "cotta") else {"every": 4} if method in ("rotta", "note") else {}


@pytest.mark.parametrize("method", METHODS)
def test_a_keyword_is_a_call_like_any_other(method: str) -> None:
    """Every method gives to the bit what it gives for the same network called with a tensor."""
    one, two = Positional(), Named()
    two.load_state_dict(one.state_dict())
    plain, named = (trueup.adapt(model, method, **hyper(method)) for model in (one, two))
    for x in XS[:2]:
        assert torch.equal(named(pixel_values=x), plain(x))
    assert torch.equal(named({"pixel_values": XS[2]}), plain(XS[2]))


def test_nothing_of_a_call_is_kept() -> None:
    adapter = trueup.adapt(Named(), "cotta", views=2)
    adapter(pixel_values=XS[0])
    twin = pickle.loads(pickle.dumps(adapter))
    copied = copy.deepcopy(adapter)
    expected = adapter(pixel_values=XS[1])
    assert torch.equal(twin(pixel_values=XS[1]), expected)
    assert torch.equal(copied(pixel_values=XS[1]), expected)
    assert all(net.runner.signature is None for net in (adapter.net, adapter.state.teacher))


def test_values_that_are_no_tensors_are_handed_on() -> None:
    adapter, plain = trueup.adapt(Named(), "source"), convnet()
    with torch.no_grad():
        torch.testing.assert_close(adapter(pixel_values=XS[0], scale=3.0), 3 * plain(XS[0]))


@pytest.mark.parametrize("how", ["positional", "keyword", "dict"])
@pytest.mark.parametrize("method", ["tent", "tsd", "t3a", "lame", "sar", "shot-im"])
def test_companions_go_along_row_by_row(method: str, how: str) -> None:
    """Two tensors are the same as one that they were put together to before."""
    weights = torch.linspace(0.5, 1.5, 12)
    calls = {
        "positional": lambda a, x: a(x, weights),
        "keyword": lambda a, x: a(x=x, weights=weights),
        "dict": lambda a, x: a({"x": x, "weights": weights}),
    }
    pair, plain = trueup.adapt(Pair(), method), trueup.adapt(Positional(), method)
    for x in XS:
        expected = plain(x * weights[:, None, None, None])
        assert torch.equal(calls[how](pair, x), expected)


def test_companions_under_autocast() -> None:
    """A second pass in the precision of the weights has them, too."""
    adapter = trueup.adapt(Pair(), "sar", margin=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert adapter(XS[0].bfloat16(), torch.ones(12)).isfinite().all()
    assert adapter.updates == 1


def test_companions_with_a_guard_that_leaves_rows_out() -> None:
    weights, x = torch.linspace(0.5, 1.5, 12), XS[0].clone()
    x[3] = torch.nan
    pair, plain = trueup.adapt(Pair(), "tent", guard=True), trueup.adapt(Positional(), "tent", guard=True)
    answer = pair(x, weights)
    assert torch.equal(answer, plain(x * weights[:, None, None, None]))
    assert torch.equal(answer[3], torch.zeros(answer.shape[1]))
    assert pair.health.quarantined == (3,)


def test_a_tensor_of_another_length_is_the_same_for_all() -> None:
    weights, gain = torch.ones(12), torch.tensor([2.0])
    pair, plain = trueup.adapt(Pair(), "tent"), trueup.adapt(Positional(), "tent")
    assert torch.equal(pair(XS[0], weights, gain), plain(XS[0] * 2))


def test_a_dict_that_the_model_takes_as_it_is() -> None:
    adapter, plain = trueup.adapt(Mapped(), "tent"), trueup.adapt(Positional(), "tent")
    offset = torch.randn(12, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    for x in XS:
        assert torch.equal(adapter({"image": x, "more": {"offset": offset}}), plain(x + offset))


@pytest.mark.parametrize("method", VIEWS)
def test_views_have_no_companions(method: str) -> None:
    """A method that changes or stores images is refused, and nothing has happened."""
    adapter = trueup.adapt(Pair(), method, **hyper(method))
    with pytest.raises(ValueError, match=r"views of images or on stored.*2 tensors.*tsd or tent"):
        adapter(XS[0], torch.ones(12))
    assert (adapter.batches, adapter.updates) == (0, 0)


def test_an_example_may_be_a_dict() -> None:
    adapter = trueup.adapt(Named(), "tsd", example={"pixel_values": XS[0]})
    assert adapter.net.head == "net.head"
    assert adapter.batches == 0


def test_source_answers_and_copies_take_the_same_calls() -> None:
    adapter = trueup.adapt(Named(), "tent", guard=True)
    answer = adapter.answer(pixel_values=XS[0])
    with torch.no_grad():
        assert torch.equal(answer.source, convnet()(XS[0]))
    assert torch.equal(adapter.frozen({"pixel_values": XS[0]}), answer.source)


@pytest.mark.parametrize("method", ["tent", "tsd", "t3a", "lame", "source", "bn", "sar", "shot-im"])
def test_bytes_for_models_that_normalise_them(method: str) -> None:
    adapter, plain = trueup.adapt(Bytes(), method), trueup.adapt(Positional(), method)
    for x in XS:
        raw = (32 * x + 128).clamp(0, 255).to(torch.uint8)
        assert torch.equal(adapter(raw), plain((raw.float() - 128) / 32))


@pytest.mark.parametrize("method", VIEWS)
def test_views_of_bytes_are_refused(method: str) -> None:
    adapter = trueup.adapt(Bytes(), method, **hyper(method))
    with pytest.raises(ValueError, match=r"views of images or on stored.*uint8.*normalise"):
        adapter((32 * XS[0] + 128).clamp(0, 255).to(torch.uint8))
    assert adapter.batches == 0


def test_bytes_for_models_that_do_not() -> None:
    with pytest.raises(ValueError, match=r"cannot take images .*uint8.*x\.float\(\) / 255"):
        trueup.adapt(convnet(), "tent")(torch.zeros(4, 3, 8, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="int64"):
        trueup.adapt(convnet(), "tent")(torch.zeros(4, 3, 8, 8, dtype=torch.int64))


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "no tensor among the inputs"),
        (({"x": 3},), {}, "no tensor"),
        (("cat",), {}, "must be a torch.Tensor, not str"),
        (([torch.zeros(2, 3)],), {}, "must be a torch.Tensor, not list"),
        ((torch.zeros(4, 3, 8, 8), torch.full((4,), torch.nan)), {}, "input 2.*NaN"),
    ],
)
def test_calls_without_images_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any], words: str) -> None:
    adapter = trueup.adapt(Pair(), "tent")
    with pytest.raises((TypeError, ValueError), match=words):
        adapter(*args, **kwargs)
    assert adapter.batches == 0


def test_what_counts_as_the_images() -> None:
    model = Pair()
    mask, tokens, x = torch.zeros(4, 5), torch.zeros(4, 7, dtype=torch.int64), torch.ones(4, 3, 8, 8)
    assert read_call(model, (mask, tokens, x), {}).shape == x.shape
    assert read_call(model, (x,), {"pixel_values": mask}).shape == mask.shape
    assert read_call(model, (tokens, mask), {}).shape == mask.shape
    plain = read_call(model, (x,), {})
    assert plain is x


def test_rows_of_a_call() -> None:
    x, weights = torch.arange(12.0).reshape(4, 3), torch.arange(4)
    batch = read_call(Pair(), (x, weights), {"gain": 2.0})
    part = batch[torch.tensor([True, False, False, True])]
    assert isinstance(part, Batch)
    args, kwargs = arguments(part)
    assert torch.equal(args[0], x[[0, 3]])
    assert args[1].tolist() == [0, 3]
    assert kwargs == {"gain": 2.0}
    assert type(args[0]) is Tensor
    assert type(batch.flip(0)) is Tensor
    assert type(torch.cat([batch, batch])) is Tensor
    assert isinstance(batch.clone(), Batch)
    assert isinstance(batch.detach(), Batch)


def test_what_a_processor_of_transformers_returns() -> None:
    """Its dict goes in as it is, as keywords, or as the tensor in it."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**small, image_size=16, num_labels=4))
    whole, words, plain = (trueup.adapt(model, "tsd", lr=1e-3) for _ in range(3))
    for x in XS:
        inputs = transformers.BatchFeature({"pixel_values": x})
        expected = plain(x)
        assert torch.equal(whole(inputs), expected)
        assert torch.equal(words(**inputs, interpolate_pos_encoding=False), expected)
    assert plain.updates == 3


class Text(nn.Module):
    """Compares images with text that is the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()
        self.net.head = nn.Identity()

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """Return similarities."""
        return self.net(x) @ text.T


def test_one_row_per_class_is_not_one_per_image() -> None:
    width = convnet().head.in_features
    with pytest.raises(ValueError, match=r"12 rows.*2 outputs, not 12.*zero_shot"):
        trueup.adapt(Text(), "tent")(XS[0], torch.randn(12, width))
    text = torch.randn(5, width, requires_grad=True)
    adapter = trueup.adapt(Text(), "tent")
    assert adapter(XS[0], text).shape == (12, 5)
    assert text.grad is None  # what is the user's is not learnt from


def test_the_source_refuses_bad_input_as_the_adapter_does() -> None:
    adapter = trueup.adapt(convnet(), "tent")
    adapter(XS[0])
    with pytest.raises(ValueError, match="cannot take images"):
        adapter.frozen(torch.zeros(4, 5, 16, 16))


class Keywords(nn.Module):
    """Takes keywords alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()

    def forward(self, **batch: Tensor) -> Tensor:
        """Answer the images."""
        return self.net(batch["image"])


def test_a_dict_for_a_model_that_takes_keywords_alone() -> None:
    assert trueup.adapt(Keywords(), "tent")({"image": XS[0]}).shape == (12, 6)
