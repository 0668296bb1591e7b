"""The embedded benchmark: what is promised of its images, and that they are always the same."""

from itertools import combinations

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from trueup.data.corruptions import CORRUPTIONS, corrupt
from trueup.data.datasets import digits, open_dataset
from trueup.data.domains import ArrayDomain, CorruptedDomain, parse_corruption

WRITTEN = ("hand", "poster", "neon")


def sources(monkeypatch: pytest.MonkeyPatch, make: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    """The numbers, in scikit-learn's set, of the digits that a domain is drawn from, and the domain's labels."""
    where = {image.tobytes(): i for i, image in enumerate(load_digits().images / 16)}
    found = []

    def place(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        found.append(where[np.ascontiguousarray(image).tobytes()])
        return image

    with monkeypatch.context() as patch:
        patch.setattr(digits, "_place", place)
        patch.setattr(digits, "poster", lambda masks, rng: masks)  # colours do not matter here, and take time
        patch.setattr(digits, "STYLES", dict.fromkeys(digits.DOMAINS, lambda masks, rng: masks))
        domain = getattr(digits, make).__wrapped__(part)
    return np.array(found), domain.labels


def border(images: np.ndarray) -> np.ndarray:
    """The mean brightness of each image's outermost pixels."""
    ring = np.ones((32, 32), dtype=bool)
    ring[2:-2, 2:-2] = False
    return images.mean(axis=3)[:, ring].mean(axis=1)


def middle(images: np.ndarray) -> np.ndarray:
    return images.mean(axis=3)[:, 8:24, 11:21].mean(axis=(1, 2))


@pytest.mark.parametrize("name", digits.DOMAINS)
def test_a_domain_has_2000_small_colour_images_of_all_ten_digits(name: str) -> None:
    domain = open_dataset("digits").domain(name)
    assert isinstance(domain, ArrayDomain)
    assert domain.name == name
    assert domain.images.shape == (2000, 32, 32, 3)
    assert domain.images.dtype == np.uint8
    assert domain.labels.shape == (2000,)
    assert domain.labels.dtype == np.int64
    counts = np.bincount(domain.labels, minlength=10)
    assert len(counts) == 10
    assert counts.min() >= 150
    assert len({image.tobytes() for image in domain.images}) == 2000


def test_making_them_leaves_the_global_random_stream_alone_and_does_not_depend_on_it() -> None:
    np.random.seed(1)
    before = np.random.get_state()[1].tolist()
    again = digits.digits_domain.__wrapped__("hand")
    assert np.random.get_state()[1].tolist() == before
    assert np.array_equal(again.images, digits.digits_domain("hand").images)


def test_no_handwritten_digit_is_in_two_domains_and_labels_are_those_of_the_writing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    truth = load_digits().target
    used = {}
    for name in WRITTEN:
        found, labels = sources(monkeypatch, "digits_domain", name)
        assert np.array_equal(truth[found], labels)
        used[name] = set(found.tolist())
    assert all(not used[a] & used[b] for a, b in combinations(WRITTEN, 2))
    assert sum(map(len, used.values())) == 1797  # none is wasted


def test_training_and_test_digits_of_the_corrupted_benchmark_are_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = load_digits().target
    train, train_labels = sources(monkeypatch, "clean_digits", "train")
    test, test_labels = sources(monkeypatch, "clean_digits", "test")
    assert not set(train.tolist()) & set(test.tolist())
    assert (len(train), len(test)) == (3000, 1000)
    assert np.array_equal(truth[train], train_labels)
    assert np.array_equal(truth[test], test_labels)


@pytest.mark.parametrize("name", digits.DOMAINS)
def test_labels_say_what_is_to_be_seen(name: str) -> None:
    # Nearest neighbours in pixels know little; with labels out of step they would be right one time in ten.
    domain = digits.digits_domain(name)
    flat = domain.images.astype(np.float32).mean(axis=3).reshape(2000, -1)
    flat -= flat.mean(axis=1, keepdims=True)
    model = KNeighborsClassifier(5).fit(flat[:1500], domain.labels[:1500])
    assert model.score(flat[1500:], domain.labels[1500:]) > 0.5


def test_the_domains_differ_in_light_contrast_polarity_and_colour() -> None:
    images = {name: digits.digits_domain(name).images.astype(int) for name in digits.DOMAINS}
    light = {name: x.mean() for name, x in images.items()}
    assert light["neon"] < 90 < light["hand"] < 150 < light["type"]
    contrast = {name: x.mean(axis=3).std(axis=(1, 2)).mean() for name, x in images.items()}
    assert 2 * contrast["hand"] < min(contrast[name] for name in ("type", "poster", "neon"))
    brighter = {
        name: float((middle(digits.digits_domain(name).images) > border(x)).mean()) for name, x in images.items()
    }
    assert max(brighter["hand"], brighter["type"]) < 0.01
    assert min(brighter["poster"], brighter["neon"]) > 0.95
    colour = {name: np.ptp(x, axis=3).mean() for name, x in images.items()}
    assert colour["hand"] == 0
    assert min(colour["poster"], colour["neon"]) > 20


def test_digits_has_four_targets_and_trains_on_the_other_three() -> None:
    dataset = open_dataset("digits")
    assert dataset.targets == ("hand", "type", "poster", "neon")
    assert dataset.classes == tuple("0123456789")
    assert dataset.sources(["poster"]) == ("hand", "type", "neon")
    with pytest.raises(ValueError, match=r"no domain 'painted'.*hand, type, poster, neon"):
        dataset.domain("painted")
    with pytest.raises(ValueError, match="leave at least one"):
        dataset.sources(dataset.targets)


def test_digits_c_trains_on_clean_digits_and_has_fifteen_corruptions() -> None:
    dataset = open_dataset("digits-c")
    assert dataset.targets == CORRUPTIONS
    assert len(dataset.targets) == 15
    assert dataset.sources(["fog"]) == ("clean",)
    assert len(dataset.domain("clean").labels) == 3000
    target = dataset.domain("fog-2")
    assert len(target.labels) == 1000
    assert target.image(0).shape == (32, 32, 3)
    with pytest.raises(ValueError, match="'rain'"):
        dataset.domain("rain")


@pytest.mark.parametrize("name", ["fog", "glass_blur-3", "impulse_noise-1"])
def test_a_corrupted_image_is_always_the_same_whatever_was_read_before(name: str) -> None:
    first, second = open_dataset("digits-c").domain(name), open_dataset("digits-c").domain(name)
    forth = [first.image(i) for i in (0, 1, 2)]
    back = [second.image(i) for i in (2, 1, 0)]
    assert all(np.array_equal(a, b) for a, b in zip(forth, reversed(back), strict=True))
    clean = digits.clean_digits("test")
    assert not np.array_equal(forth[0], clean.images[0])
    assert np.array_equal(first.labels, clean.labels)
    assert first.image_name(1) == "clean-test[1]"


def test_corruption_comes_after_resizing_and_each_image_has_its_own_noise() -> None:
    flat = np.full((2, 8, 8, 3), 128, dtype=np.uint8)
    domain = CorruptedDomain(ArrayDomain("flat", flat, np.zeros(2, dtype=np.int64)), "gaussian_noise", 4, seed=9)
    large = np.full((16, 16, 3), 128, dtype=np.uint8)
    assert np.array_equal(domain.image(1, 16), corrupt(large, "gaussian_noise", 4, seed=9, index=1))
    assert not np.array_equal(domain.image(0), domain.image(1))
    assert domain.name == "gaussian_noise-4"


@pytest.mark.parametrize(
    ("name", "meaning"), [("fog", ("fog", 5)), ("fog-3", ("fog", 3)), ("jpeg_compression-1", ("jpeg_compression", 1))]
)
def test_a_name_means_a_corruption_and_a_severity(name: str, meaning: tuple[str, int]) -> None:
    assert parse_corruption(name) == meaning


@pytest.mark.parametrize("name", ["fog-6", "fog-0", "fog--1", "fog-3.0", "fog-33", "fog-3-3", "Fog", "", "-3", "mist"])
def test_other_names_are_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match="gaussian_noise, shot_noise") as error:
        parse_corruption(name)
    assert repr(name) in str(error.value)


def test_a_dash_without_a_severity_is_refused() -> None:
    with pytest.raises(ValueError, match="fog-"):
        parse_corruption("fog-")


@pytest.mark.parametrize("name", ["digits-x", "digit", "digitsc"])
def test_near_misses_of_the_embedded_names_are_refused_with_a_hint(name: str) -> None:
    with pytest.raises(ValueError, match="Did you mean 'digits"):
        open_dataset(name)
