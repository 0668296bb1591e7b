"""unwrap() is the model that answered: its weights, and the moments that it normalised with."""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trueup
from trueup.core import files
from trueup.core.adapter import Adapter
from trueup.core.state import AdapterState
from trueup.norm import make_policy, policy
from trueup.norm.policy import BatchPolicy, batch_moments
from trueup.testing import convnet, images
from trueup.testing.case import difference, play, same

SIZES = (24, 7, 64, 3, 100)
XS = [images(n, seed=900 + i, shift=1.0)[0] for i, n in enumerate(SIZES)]


def moments(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Mean and biased variance of each channel, by numpy."""
    values = np.moveaxis(x.detach().double().numpy(), 1, 0).reshape(x.shape[1], -1)
    return values.mean(axis=1), ((values - values.mean(axis=1, keepdims=True)) ** 2).mean(axis=1)


def weights_of(sizes: tuple[int, ...]) -> np.ndarray:
    """What each batch counts for in the end: its images, and less with every batch that came later."""
    counts = [n * np.prod([0.9 ** min(1, m / 64) for m in sizes[i + 1 :]]) for i, n in enumerate(sizes)]
    return np.array(counts) / sum(counts)


def mixture(parts: list[tuple[np.ndarray, np.ndarray]], weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Moments of a weighted mixture of distributions with these moments."""
    first = sum(w * mean for w, (mean, _) in zip(weights, parts, strict=True))
    second = sum(w * (variance + mean**2) for w, (mean, variance) in zip(weights, parts, strict=True))
    return first, second - first**2


def expect(model: nn.Module, name: str, mean: np.ndarray, variance: np.ndarray, within: float = 1e-12) -> None:
    for key, value in (("running_mean", mean), ("running_var", variance)):
        np.testing.assert_allclose(model.get_buffer(f"{name}.{key}").numpy(), value, rtol=within, atol=within)


def seen_by(model: nn.Module, layers: tuple[str, ...], run: Callable[[], object]) -> list[dict[str, Tensor]]:
    """What goes into layers in each call of a model."""
    calls: list[dict[str, Tensor]] = []
    first, handles = layers[0], []
    for name in layers:

        def note(_: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            if name == first:
                calls.append({})
            calls[-1][name] = args[0].detach().clone()

        handles.append(model.get_submodule(name).register_forward_pre_hook(note))
    run()
    for handle in handles:
        handle.remove()
    return calls


def by_policy(policy: str, source: tuple[np.ndarray, np.ndarray], x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """What a policy normalises a batch with, from its definition."""
    share = {"batch": 1.0, "mix:0.3": 0.3, "prior:16": len(x) / (len(x) + 16)}[policy]
    mean, variance = moments(x)
    return share * mean + (1 - share) * source[0], share * variance + (1 - share) * source[1]


@pytest.mark.parametrize("policy", ["batch", "mix:0.3", "prior:16"])
def test_moments_are_pooled_as_the_formula_says(policy: str) -> None:
    """Against the moments of a weighted mixture of all batches, worked out at once."""
    model = convnet().double()
    adapter = trueup.adapt(model, "bn", norm=policy, example=XS[0].double())
    calls = seen_by(adapter.net.model, ("bn0", "bn1"), lambda: play(adapter, [x.double() for x in XS]))
    assert len(calls) == len(XS)
    plain = adapter.unwrap()
    for name in ("bn0", "bn1"):
        source = tuple(model.get_buffer(f"{name}.{n}").numpy() for n in ("running_mean", "running_var"))
        expect(plain, name, *mixture([by_policy(policy, source, c[name]) for c in calls], weights_of(SIZES)))


def test_moments_of_batches_are_those_of_all_their_pixels() -> None:
    """Against every value of the stream at once, each with the weight of its batch."""
    adapter = trueup.adapt(convnet().double(), "bn", example=XS[0].double())
    calls = seen_by(adapter.net.model, ("bn0",), lambda: play(adapter, [x.double() for x in XS]))
    values = [np.moveaxis(c["bn0"].numpy(), 1, 0).reshape(16, -1) for c in calls]
    each = [np.full(v.shape[1], w / v.shape[1]) for v, w in zip(values, weights_of(SIZES), strict=True)]
    whole, share = np.concatenate(values, axis=1), np.concatenate(each)
    mean = (whole * share).sum(axis=1)
    expect(adapter.unwrap(), "bn0", mean, ((whole - mean[:, None]) ** 2 * share).sum(axis=1))


def test_the_unwrapped_model_is_the_model_with_these_statistics() -> None:
    adapter = trueup.adapt(convnet(), "tent")
    play(adapter, XS)
    plain, kept = adapter.unwrap(), adapter.net.policy.by_name(adapter.net.model)
    ours = {**dict(adapter.net.model.named_parameters()), **dict(adapter.net.model.named_buffers()), **kept}
    for name, tensor in {**dict(plain.named_parameters()), **dict(plain.named_buffers())}.items():
        assert torch.equal(tensor, ours[name]), name
    assert sorted(kept) == [f"bn{i}.running_{n}" for i in (0, 1) for n in ("mean", "var")]


class Odd(nn.Module):
    """A layer that runs twice in a forward, one that never runs, and one that sees a single value of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.never, self.pooled = nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.BatchNorm1d(3)
        self.fc = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x) * 2 + 1)
        out: Tensor = self.fc(self.pooled(x.mean(dim=(2, 3))))
        return out


def odd() -> Odd:
    torch.manual_seed(0)
    model = Odd().double().eval()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2.0) if name.endswith("var") else buffer.normal_()
    return model


def standardised(x: Tensor) -> Tensor:
    mean, variance = (torch.from_numpy(t).view(1, -1, 1, 1) for t in moments(x))
    return (x - mean) / (variance + 1e-5).sqrt()


def test_a_layer_that_runs_twice_counts_twice_and_one_that_never_runs_keeps_its_own() -> None:
    xs = [torch.randn(n, 3, 4, 4, dtype=torch.float64) + n for n in (8, 5)]
    model = odd()
    adapter = trueup.adapt(model, "bn", example=xs[0])
    play(adapter, xs)
    plain, twice, pooled = adapter.unwrap(), [], []
    for x in xs:
        y = standardised(x) * 2 + 1
        twice += [moments(x), moments(y)]
        pooled.append(moments(standardised(y).mean(dim=(2, 3))))
    expect(plain, "twice", *mixture(twice, weights_of((8, 8, 5, 5))))
    expect(plain, "pooled", *mixture(pooled, weights_of((8, 5))))
    for name in ("never.running_mean", "never.running_var"):
        assert torch.equal(plain.get_buffer(name), model.get_buffer(name))


def test_single_images_keep_the_statistics_of_layers_that_see_one_value() -> None:
    """Such a layer answers with the source's, so the plain model does; single images count for 64 of a batch."""
    xs = [torch.randn(1, 3, 4, 4, dtype=torch.float64) + n for n in range(70)]
    model = odd()
    adapter = trueup.adapt(model, "bn", example=xs[0])
    play(adapter, xs)
    plain = adapter.unwrap()
    for name in ("pooled.running_mean", "pooled.running_var"):
        assert torch.equal(plain.get_buffer(name), model.get_buffer(name))
    counts = np.array([0.9 ** (i / 64) for i in reversed(range(2 * len(xs)))])
    policy = adapter.net.policy
    assert isinstance(policy, BatchPolicy)
    np.testing.assert_allclose(policy.images[:3].numpy(), counts.sum(), rtol=1e-12)


def test_channels_that_are_not_finite_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3)).double()
    layer, used = model[0], make_policy("batch")
    assert isinstance(used, BatchPolicy)
    used.restart(model, classes=None, dense=False)
    assert isinstance(layer, nn.BatchNorm1d)
    one, nan, inf = torch.ones(3).double(), float("nan"), float("inf")
    used.remember(
        model, {layer: [(torch.tensor([1.0, nan, 2.0]).double(), torch.tensor([4.0, 4.0, inf]).double(), 10)]}
    )
    found = used.by_name(model)
    assert found["0.running_mean"].tolist() == [1.0, 0.0, 0.0]  # the layer's own where nothing was seen
    assert found["0.running_var"].tolist() == [4.0, 1.0, 1.0]
    used.remember(model, {layer: [(3 * one, one, 10)]})
    found = used.by_name(model)
    assert found["0.running_mean"][1:].tolist() == [3.0, 3.0]
    assert found["0.running_var"][1:].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("part", [64, policy.PART])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_batch_moments_are_exact_far_from_zero(
    part: int, last: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts or at once, in any layout; the mean of squares less the squared mean would be far off."""
    monkeypatch.setattr(policy, "PART", part)
    x = torch.randn(9, 4, 5, 5, generator=torch.Generator().manual_seed(0)) + 1000.0 * torch.arange(4).view(1, 4, 1, 1)
    x = x.to(dtype).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    mean, variance = batch_moments(x)
    assert mean.dtype == variance.dtype == torch.promote_types(dtype, torch.float32)
    expected = moments(x)
    within = 1e-12 if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(mean.numpy(), expected[0], rtol=within, atol=within)
    np.testing.assert_allclose(variance.numpy(), expected[1], rtol=within, atol=within)


@pytest.mark.parametrize("method", ["bn", "tent", "bn-prior", "tsd"])
def test_the_record_is_no_part_of_the_answers(method: str) -> None:
    recording, silent = (trueup.adapt(convnet(), method, example=XS[0]) for _ in range(2))
    silent.net.policy.frozen = True
    assert same(play(recording, XS), play(silent, XS))
    assert isinstance(recording.net.policy, BatchPolicy)
    assert not recording.net.policy.empty


# State


def plain_tensors(adapter: Adapter) -> list[Tensor]:
    plain = adapter.unwrap()
    return [t.detach() for t in (*plain.parameters(), *plain.buffers())]


@pytest.mark.parametrize("method", ["tent", "cotta", "bn-prior"])
def test_saved_and_resumed_to_the_bit(method: str, tmp_path: Path) -> None:
    hyper: dict[str, Any] = {"views": 2} if method == "cotta" else {}
    adapter, other = (trueup.adapt(convnet(), method, **hyper) for _ in range(2))
    play(adapter, XS[:3])
    adapter.save(tmp_path / "state")
    other.load(tmp_path / "state")
    assert difference(adapter, other) == []
    assert same(plain_tensors(adapter), plain_tensors(other))
    play(adapter, XS[3:])
    play(other, XS[3:])
    assert same(plain_tensors(adapter), plain_tensors(other))


def test_reset_forgets_the_moments() -> None:
    model = convnet()
    adapter = trueup.adapt(model, "tent")
    play(adapter, XS)
    first = plain_tensors(adapter)
    adapter.reset()
    assert same(plain_tensors(adapter), [t.detach() for t in (*model.parameters(), *model.buffers())])
    play(adapter, XS)
    assert same(plain_tensors(adapter), first)


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("method", ["tent", "cotta"])
def test_a_file_of_an_older_version_is_taken(method: str, guard: bool, tmp_path: Path) -> None:
    """It has no moments; the answers go on to the bit, and the moments are those of the batches since."""
    hyper: dict[str, Any] = {"views": 2} if method == "cotta" else {}
    adapter, other, fresh = (trueup.adapt(convnet(), method, guard=guard, **hyper) for _ in range(3))
    play(adapter, XS[:3])
    adapter.save(tmp_path / "new")
    tensors, header = files.read(tmp_path / "new")
    older = {name: t for name, t in tensors.items() if "policy" not in name.replace("/", ".").split(".")}
    assert len(older) < len(tensors)
    files.write(tmp_path / "old", older, header)
    other.load(tmp_path / "old")
    assert same(play(adapter, XS[3:]), play(other, XS[3:]))
    assert same(list(adapter.net.model.parameters()), list(other.net.model.parameters()))
    torch.testing.assert_close(other.net.policy.get_buffer("images"), torch.full((40,), 0.9 * 3.0 + 100.0))
    play(fresh, XS[:1])
    tensors = {name: t[:3] if name == "policy/mean" else t for name, t in tensors.items()}
    files.write(tmp_path / "wrong", tensors | {"policy/more": torch.zeros(3)}, header)
    with pytest.raises(ValueError, match="does not fit"):
        fresh.load(tmp_path / "wrong")


def test_copies_and_a_way_back_have_moments_of_their_own() -> None:
    adapter = trueup.adapt(convnet(), "tent", guard=True)
    play(adapter, XS[:2])
    before, twin, moment = plain_tensors(adapter), copy.deepcopy(adapter), AdapterState.capture(adapter)
    play(adapter, XS[2:])
    assert same(plain_tensors(twin), before)
    assert not same(plain_tensors(adapter), before)
    moment.apply(adapter)
    assert same(plain_tensors(adapter), before)


def test_moments_stay_exact_when_an_adapter_goes_to_lower_precision() -> None:
    adapter = trueup.adapt(convnet(), "bn")
    play(adapter, XS[:2])
    policy = adapter.net.policy
    kept = {name: t.clone() for name, t in policy.named_buffers()}
    adapter.to(torch.bfloat16)
    assert all(torch.equal(policy.get_buffer(name), t) for name, t in kept.items())
    assert adapter(XS[2].bfloat16()).isfinite().all()
    assert next(adapter.unwrap().buffers()).dtype == torch.bfloat16
    adapter.double()
    assert policy.get_buffer("mean").dtype == torch.float64


# What unwrap() gives, and what it says


@pytest.mark.parametrize("norm", ["batch", "mix:0.3", "prior:16"])
def test_source_statistics_are_what_unwrap_gave_before(norm: str) -> None:
    """The adapted weights, with the running statistics that the source was trained with."""
    model = convnet()
    adapter = trueup.adapt(model, "tent", norm=norm)
    play(adapter, XS)
    plain = adapter.unwrap(statistics="source")
    for name, p in plain.named_parameters():
        assert torch.equal(p, adapter.net.model.get_parameter(name))
    assert not torch.equal(plain.get_parameter("bn0.weight"), model.get_parameter("bn0.weight"))
    assert all(torch.equal(b, model.get_buffer(name)) for name, b in plain.named_buffers())


@pytest.mark.parametrize("hyper", [{"norm": "ema"}, {"preset": "safe"}], ids=str)
def test_policies_that_keep_estimates_hand_these_over(hyper: dict[str, Any]) -> None:
    model = convnet()
    adapter = trueup.adapt(model, "tent", **hyper)
    play(adapter, XS)
    plain = adapter.unwrap()
    assert all(torch.equal(b, adapter.net.model.get_buffer(name)) for name, b in plain.named_buffers())
    assert not torch.equal(plain.get_buffer("bn0.running_mean"), model.get_buffer("bn0.running_mean"))
    with torch.no_grad():  # in which nothing is left out: estimates answer
        assert torch.allclose(plain(XS[0]), adapter.net(XS[0]).logits, rtol=1e-5, atol=1e-5)
    source = adapter.unwrap(statistics="source")
    assert torch.equal(source.get_buffer("bn0.running_mean"), model.get_buffer("bn0.running_mean"))


@pytest.mark.parametrize("value", ["batch", "", None, True])
def test_statistics_that_do_not_exist_are_refused(value: Any) -> None:
    adapter = trueup.adapt(convnet(), "bn")
    with pytest.raises(ValueError, match=r"statistics=.* must be one of 'adapted', 'source'"):
        adapter.unwrap(statistics=value)


def test_before_the_first_batch_it_is_the_source(caplog: pytest.LogCaptureFixture) -> None:
    model = convnet()
    for example in (None, XS[0]):
        for method in ("bn", "t3a", "cotta"):
            plain = trueup.adapt(model, method, example=example).unwrap()
            assert same(list(plain.state_dict().values()), list(model.state_dict().values()))
    assert not caplog.records


def test_rotta_hands_over_its_teacher() -> None:
    """The teacher answers, with estimates of its own: the plain model gives the same answers."""
    adapter = trueup.adapt(convnet(), "rotta", momentum=0.5, lr=0.05)
    play(adapter, XS)
    plain = adapter.unwrap()
    assert not torch.equal(plain.get_parameter("bn0.weight"), adapter.net.model.get_parameter("bn0.weight"))
    x = images(10, seed=5, shift=1.0)[0]
    assert adapter.state.memory.until_update(64) >= len(x)  # no update in between
    with torch.no_grad():
        assert torch.allclose(plain(x), adapter(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("confidence", [0.0, 1.0])
def test_cotta_hands_over_its_teacher(confidence: float) -> None:
    """With the moments of the images, or of the views, that the teacher saw; they are not the student's."""
    adapter = trueup.adapt(convnet(), "cotta", confidence=confidence, views=4, lr=0.01)
    play(adapter, XS)
    plain, teacher = adapter.unwrap(), adapter.state.teacher
    for name, p in plain.named_parameters():
        assert torch.equal(p, teacher.model.get_parameter(name))
    assert p.requires_grad
    kept = teacher.policy.by_name(teacher.model)
    assert all(torch.equal(plain.get_buffer(name), t) for name, t in kept.items())
    assert not teacher.policy.empty
    assert not torch.equal(kept["bn1.running_mean"], adapter.net.policy.by_name(adapter.net.model)["bn1.running_mean"])


LOST = {
    "t3a": "prototypes", "lame": "agreement", "tast": "projections", "tast-bn": "memory of images",
    "tent-prebn": "normalisation layer", "roid": "prior", "memo": "step on each image", "cotta": "views",
    "note": "corrected for each image",
}  # fmt: skip


@pytest.mark.parametrize("name", trueup.list_methods())
def test_a_warning_names_what_is_lost(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Once, by those methods whose gain is not in the weights; the others say nothing."""
    hyper: dict[str, Any] = {"views": 2} if name in ("memo", "cotta") else {}
    adapter = trueup.adapt(convnet(), name, **hyper)
    adapter(XS[0])
    with caplog.at_level(logging.WARNING, "trueup"):
        caplog.clear()
        adapter.unwrap(statistics="source")
        assert not caplog.records
        adapter.unwrap()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (name in LOST)
    for line in said:
        assert f"what {name} answered with" in line
        assert LOST[name] in line


@pytest.mark.parametrize(
    ("method", "hyper", "what"),
    [
        ("tent", {"episodic": True}, "episodic=True"),
        ("bn", {"episodic": True}, "episodic=True"),
        ("source", {"episodic": True}, None),
        ("rdumb", {"every": 5}, "was reset after the last"),
        ("rdumb", {"every": 4}, None),
        ("tent", {"norm": "instance"}, "corrected for each image"),
        ("note", {"norm": "batch"}, None),
    ],
    ids=str,
)
def test_settings_that_lose_something_are_named(
    method: str, hyper: dict[str, Any], what: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = trueup.adapt(convnet(), method, **hyper)
    play(adapter, XS)
    with caplog.at_level(logging.WARNING, "trueup"):
        caplog.clear()
        adapter.unwrap()
    assert [what in r.getMessage() for r in caplog.records if what] == ([] if what is None else [True])
    assert bool(caplog.records) == (what is not None)


def test_a_compiled_model_says_that_it_has_no_moments(caplog: pytest.LogCaptureFixture) -> None:
    """Not even those of a last batch that was too small for the graph."""
    model = convnet()
    adapter = trueup.adapt(model, "bn")
    adapter(XS[3])
    adapter.net.runner.settings = replace(adapter.net.runner.settings, compile=True)
    with caplog.at_level(logging.WARNING, "trueup"):
        plain = adapter.unwrap()
    assert "without compile=True" in caplog.text
    assert same(list(plain.buffers()), list(model.buffers()))


# Export


@pytest.fixture(scope="module")
def exported() -> tuple[nn.Module, torch.export.ExportedProgram]:
    adapter = trueup.adapt(convnet(), "tent")
    play(adapter, XS)
    plain = adapter.unwrap()
    return plain, torch.export.export(plain, (XS[0],), dynamic_shapes=({0: torch.export.Dim.AUTO},))


def test_torch_export_reproduces_the_plain_model(exported: tuple[nn.Module, torch.export.ExportedProgram]) -> None:
    plain, program = exported
    with torch.no_grad():
        for x in XS:
            assert torch.allclose(program.module()(x), plain(x), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_onnx_reproduces_the_plain_model(
    exported: tuple[nn.Module, torch.export.ExportedProgram], tmp_path: Path
) -> None:
    import onnxruntime

    plain, program = exported
    written = torch.onnx.export(program, dynamo=True, verbose=False)
    assert written is not None
    written.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    name = session.get_inputs()[0].name
    for x in XS:
        with torch.no_grad():
            expected = plain(x).numpy()
        np.testing.assert_allclose(session.run(None, {name: x.numpy()})[0], expected, rtol=1e-4, atol=1e-4)
