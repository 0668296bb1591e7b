"""Zero-shot CLIP of open_clip and transformers: the library's own logits, adapted against fixed text features."""

from collections.abc import Callable
from types import SimpleNamespace

import open_clip
import pytest
import torch
import transformers
from torch import Tensor, nn

import trueup
from trueup.model.readout import CosineHead

SIZE, CLASSES = 32, 5
X = torch.randn(8, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(1, 90, (CLASSES, 8), generator=torch.Generator().manual_seed(1))

TEXT = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TEXT |= {"max_position_embeddings": 8, "eos_token_id": 98, "bos_token_id": 97, "pad_token_id": 0}
VISION = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
VISION |= {"image_size": SIZE, "patch_size": 8}


def tiny_clip() -> nn.Module:
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=12))


def tiny_siglip() -> nn.Module:
    model = transformers.SiglipModel(transformers.SiglipConfig(text_config=TEXT, vision_config=VISION))
    model.logit_bias.data.fill_(-3.0)  # it starts at 0, and so does the scale's logarithm
    model.logit_scale.data.fill_(1.5)
    return model


def tiny_open_clip(vision: dict, **more: object) -> nn.Module:
    text = {"context_length": 8, "vocab_size": 99, "width": 16, "heads": 2, "layers": 1}
    kind = open_clip.CustomTextCLIP if more else open_clip.CLIP
    return kind(embed_dim=12, vision_cfg={"image_size": SIZE, **vision}, text_cfg=text, **more)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "open_clip ViT": lambda: tiny_open_clip({"layers": 2, "width": 16, "head_width": 8, "patch_size": 8}),
    "open_clip ResNet": lambda: tiny_open_clip({"layers": [1, 1, 1, 1], "width": 8, "head_width": 8}),
    "open_clip SigLIP": lambda: tiny_open_clip(
        {"layers": 2, "width": 16, "head_width": 8, "patch_size": 8}, init_logit_bias=-10.0
    ),
    "transformers CLIP": tiny_clip,
    "transformers SigLIP": tiny_siglip,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def text_of(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        if hasattr(model, "encode_text"):
            return model.encode_text(tokens)
        text = model.get_text_features(input_ids=tokens)
    return text if isinstance(text, Tensor) else text.pooler_output


def own_logits(model: nn.Module, x: Tensor) -> Tensor:
    """What the library itself answers."""
    with torch.no_grad():
        if hasattr(model, "get_logits"):
            return model.get_logits(x, TOKENS)[0]
        return model(input_ids=TOKENS, pixel_values=x).logits_per_image


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_librarys_own(name: str) -> None:
    model = build(name)
    expected = own_logits(model, X)
    assert expected.std() > 1e-3
    classifier = trueup.zero_shot(model, text_of(model))
    with torch.no_grad():
        torch.testing.assert_close(classifier(X), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(trueup.adapt(classifier, "source")(X), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_encoder_adapts_and_the_text_stays(name: str) -> None:
    model = build(name)
    before = {key: t.clone() for key, t in model.state_dict().items()}
    classifier = trueup.zero_shot(model, text_of(model))
    for method in ("tsd", "t3a", "shot-im", "tent", "lame"):
        adapter = trueup.adapt(classifier, method)
        assert adapter(X).shape == adapter(X.flip(3)).shape == (len(X), CLASSES)
        assert adapter.net.head == "head"
        learns = method in ("tsd", "shot-im", "tent")
        assert adapter.updates == (2 if learns else 0)
        assert not any(key.startswith("head.") for key in adapter.net.selected)
        plain = adapter.net.model
        for key in ("weight", "scale"):
            assert torch.equal(getattr(plain.head, key), getattr(classifier.head, key))
        pairs = zip(plain.parameters(), classifier.parameters(), strict=True)
        assert learns == any(not torch.equal(p, q) for p, q in pairs)
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())


def test_features_and_prototypes_are_those_of_the_cosines() -> None:
    """Features are unit vectors and the head's rows are the text's; TSD's and T3A's banks start with these."""
    model = build("transformers CLIP")
    text = text_of(model)
    adapter = trueup.adapt(trueup.zero_shot(model, 7.0 * text), "t3a", example=X)
    with torch.no_grad():
        out, image = adapter.net(X), model.get_image_features(pixel_values=X)
    image = image if isinstance(image, Tensor) else image.pooler_output
    torch.testing.assert_close(out.features, image / image.norm(dim=1, keepdim=True))
    torch.testing.assert_close(adapter.net.weight, text / text.norm(dim=1, keepdim=True))
    torch.testing.assert_close(adapter.net.classify(out.features), out.logits)


def test_any_encoder_will_do_and_the_scale_is_said() -> None:
    torch.manual_seed(0)
    encoder, text = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 6)), torch.randn(4, 6)
    with pytest.raises(ValueError, match=r"Sequential has no logit_scale: pass scale=, 100"):
        trueup.zero_shot(encoder, text)
    classifier = trueup.zero_shot(encoder, text, scale=10)
    with torch.no_grad():
        features = encoder(X)
        cosines = torch.stack([torch.cosine_similarity(features, row[None], dim=1) for row in text], dim=1)
        torch.testing.assert_close(classifier(X), 10 * cosines)
    own = build("transformers CLIP")
    with torch.no_grad():
        texts = text_of(own)
        halved = trueup.zero_shot(own, texts, scale=0.5)(X) * 2
        torch.testing.assert_close(halved * float(own.logit_scale.exp()), own_logits(own, X), rtol=1e-4, atol=1e-5)


def test_vision_towers_with_a_projection_alone() -> None:
    full = build("transformers CLIP")
    torch.manual_seed(0)
    tower = transformers.CLIPVisionModelWithProjection(
        transformers.CLIPVisionConfig(**VISION, projection_dim=12)
    ).eval()
    tower.load_state_dict(full.state_dict(), strict=False)
    scale = float(full.logit_scale.detach().exp())
    with torch.no_grad():
        logits = trueup.zero_shot(tower, text_of(full), scale=scale)(X)
    torch.testing.assert_close(logits, own_logits(full, X), rtol=1e-5, atol=1e-5)


def test_the_models_mode_is_left_alone_and_its_weights_are_shared() -> None:
    model = build("open_clip ViT").train()
    classifier = trueup.zero_shot(model, text_of(model))
    assert model.training
    assert model.visual.training
    assert {id(p) for p in classifier.parameters()} == {id(p) for p in model.visual.parameters()}


def test_precision_follows_the_encoder_and_state_is_saved(tmp_path: object) -> None:
    model = build("transformers CLIP").double()
    text = text_of(model)
    classifier = trueup.zero_shot(model, text.float())
    assert classifier.head.weight.dtype == torch.float64
    adapter = trueup.adapt(classifier, "tsd")
    adapter(X.double())
    adapter.save(tmp_path / "state")
    other = trueup.adapt(classifier, "tsd")
    other.load(tmp_path / "state")
    assert torch.equal(adapter(X.double()), other(X.double()))


ROW = torch.randn(CLASSES, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("text", "scale", "error", "message"),
    [
        ([[1.0]], None, TypeError, "text_features must be a torch.Tensor, not list"),
        (SimpleNamespace(pooler_output=ROW), None, TypeError, "not SimpleNamespace; pass its pooler_output"),
        (ROW[0], None, ValueError, r"of shape \(12,\): expected one row"),
        (ROW[:1], None, ValueError, "at least two classes"),
        (ROW.long(), None, ValueError, "int64 of shape"),
        (ROW * torch.tensor([1.0, 0, 1, 1, 1])[:, None], None, ValueError, r"zero or not finite: \[1\]"),
        (ROW * torch.tensor([1.0, 1, 1, torch.nan, 1])[:, None], None, ValueError, r"zero or not finite: \[3\]"),
        (ROW, 0, ValueError, "scale=0 must be a number above 0"),
        (ROW, True, ValueError, "scale=True must be"),
        (ROW, float("inf"), ValueError, "scale=inf must be"),
        (ROW, "100", ValueError, "scale='100' must be"),
    ],
)
def test_what_makes_no_classifier_is_refused(text: Tensor, scale: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        trueup.zero_shot(build("transformers CLIP"), text, scale=scale)


def test_text_of_another_model_and_other_answers_are_refused() -> None:
    model = build("open_clip ViT")
    with pytest.raises(ValueError, match=r"image features of shape \(8, 12\) and text_features have 7 values each"):
        trueup.adapt(trueup.zero_shot(model, ROW[:, :7]), "tsd")(X)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        trueup.zero_shot("ViT-B-32", ROW)

    class Listing(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [x]

    with pytest.raises(ValueError, match=r"image encoder returned list, not features of shape \(N, D\)"):
        trueup.zero_shot(Listing(), ROW, scale=1.0)(X)


def test_a_head_of_text_has_nothing_to_learn() -> None:
    model = build("open_clip ViT")
    with pytest.raises(ValueError, match="nothing to update: params='head'"):
        trueup.adapt(trueup.zero_shot(model, ROW), "tent", params="head")(X)
    assert isinstance(trueup.zero_shot(model, ROW).head, CosineHead)
