"""Cards: what is known of each dataset adds up, and a wrong name gets a hint."""

from itertools import pairwise
from pathlib import Path

import pytest

from trueup.data.cards import CARDS, get_card
from trueup.data.corruptions import CORRUPTIONS
from trueup.data.datasets import mask_datasets as masked
from trueup.data.datasets import open_dataset
from trueup.data.slices import SliceDomain


@pytest.mark.parametrize(
    ("name", "classes", "images"),
    [
        ("digits", 10, 8_000),
        ("digits-c", 10, 15_000),
        ("pacs", 7, 9_991),
        ("officehome", 65, 15_588),
        ("vlcs", 5, 10_729),
        ("domainnet", 345, 586_575),
        ("cifar10-c", 10, 750_000),
        ("cifar100-c", 100, 750_000),
        ("imagenet-c", 1000, 3_750_000),
        ("fundus", 3, 400 + 101 + 159),
        ("cardiac", 4, 2 * 100 + 45),
        ("prostate", 2, 32 + 50),
        ("fundus-sim", 3, 480),
        ("cardiac-sim", 4, 48),
        ("prostate-sim", 2, 48),
    ],
)
def test_a_card_has_the_published_numbers(name: str, classes: int, images: int) -> None:
    card = get_card(name)
    assert (card.name, card.classes, card.images) == (name, classes, images)


def test_there_is_a_card_for_each_dataset_and_no_other() -> None:
    images = ["digits", "digits-c", "pacs", "officehome", "vlcs", "domainnet", "cifar10-c", "cifar100-c", "imagenet-c"]
    masks = ["fundus", "cardiac", "prostate", "fundus-sim", "cardiac-sim", "prostate-sim"]
    assert sorted(CARDS) == sorted(images + masks)
    assert sorted(masked.NAMES) == sorted([*masks, "masks"])


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_complete_and_its_counts_add_up(name: str) -> None:
    card = CARDS[name]
    assert card.kind in ("domains", "corruptions", "masks", "embedded")
    assert (card.kind == "masks") == (name in masked.ON_DISK)
    assert all((card.title, card.licence, card.layout))
    assert card.home.startswith(("https://", "http://")) or card.kind == "embedded"
    assert not card.class_names or len(card.class_names) == len(set(card.class_names)) == card.classes
    if name in masked.NAMES:
        assert card.class_names[0] == "background"
    else:
        assert all(a < b for a, b in pairwise(card.class_names))  # as folders are numbered
    assert set(card.counts) <= set(card.domains)
    for domain, counts in card.counts.items():
        assert len(counts) == card.classes
        assert sum(counts) == card.domains[domain]
    if name.endswith("-c"):
        assert tuple(card.domains) == CORRUPTIONS


@pytest.mark.parametrize("name", [card.name for card in CARDS.values() if card.kind == "embedded"])
def test_a_card_of_what_is_embedded_is_that_of_what_is_opened(name: str) -> None:
    card, dataset = CARDS[name], open_dataset(name)
    assert dataset.classes == card.class_names
    assert (dataset.domains or dataset.targets) == tuple(card.domains)
    assert set(dataset.targets) <= set(card.domains)
    assert dataset.task == ("segmentation" if name in masked.NAMES else "classification")
    for domain, count in card.domains.items():
        opened = dataset.domain(domain)
        if dataset.task == "segmentation":
            assert isinstance(opened, SliceDomain)
            assert len(opened.cases) == count
        else:
            assert len(opened.labels) == count


@pytest.mark.parametrize("name", masked.ON_DISK)
def test_a_card_of_masks_has_the_domains_and_classes_that_are_looked_for(name: str) -> None:
    card, module, drawn = CARDS[name], masked.ON_DISK[name], CARDS[f"{name}-sim"]
    assert tuple(card.domains) == module.DOMAINS
    assert card.class_names == drawn.class_names == module.CLASSES
    assert sorted({k for classes in module.STRUCTURES.values() for k in classes}) == list(range(1, card.classes))


def test_pacs_has_the_counts_of_each_class() -> None:
    assert set(CARDS["pacs"].counts) == {"art_painting", "cartoon", "photo", "sketch"}
    assert sum(counts[-1] for counts in CARDS["pacs"].counts.values()) == 449 + 405 + 432 + 160  # people


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("pasc", "pacs"),
        ("office-home", "officehome"),
        ("domain-net", "domainnet"),
        ("cifar10c", "cifar10-c"),
        ("fundussim", "fundus-sim"),
        ("protsate", "prostate"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(tmp_path: Path, wrong: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"no dataset is called '{wrong}'. Did you mean '{right}'?"):
        get_card(wrong)
    with pytest.raises(ValueError, match=f"Did you mean '{right}'?"):
        open_dataset(wrong, tmp_path)


def test_a_name_like_none_is_refused_with_all_there_are() -> None:
    everything = ", ".join(CARDS)
    with pytest.raises(ValueError, match=f"There are: {everything}, and your own as folder or masks") as error:
        get_card("xyz")
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("published", "right"),
    [("PACS", "pacs"), ("VLCS", "vlcs"), ("OfficeHome", "officehome"), ("DomainNet", "domainnet")],
)
def test_a_name_as_the_papers_spell_it_gets_its_hint(published: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"Did you mean '{right}'"):
        get_card(published)


@pytest.mark.parametrize(
    ("name", "layout"), [("folder", "ROOT/domain/class/image"), ("masks", "ROOT/domain/masks/NAME")]
)
def test_one_s_own_data_has_no_card_and_is_no_wrong_name(name: str, layout: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has no card: it is your own data, laid out as .*{layout}"):
        get_card(name)
