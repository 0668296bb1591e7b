"""Cards: what is known of each dataset adds up, and a wrong name gets a hint."""

from itertools import pairwise
from pathlib import Path

import pytest

from trueup.data.cards import CARDS, get_card
from trueup.data.corruptions import CORRUPTIONS
from trueup.data.datasets import open_dataset


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
    ],
)
def test_a_card_has_the_published_numbers(name: str, classes: int, images: int) -> None:
    card = get_card(name)
    assert (card.name, card.classes, card.images) == (name, classes, images)


def test_there_is_a_card_for_each_dataset_and_no_other() -> None:
    assert sorted(CARDS) == sorted(
        ["digits", "digits-c", "pacs", "officehome", "vlcs", "domainnet", "cifar10-c", "cifar100-c", "imagenet-c"]
    )


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_complete_and_its_counts_add_up(name: str) -> None:
    card = CARDS[name]
    assert card.kind in ("domains", "corruptions", "embedded")
    assert all((card.title, card.licence, card.layout))
    assert card.home.startswith("https://") or card.kind == "embedded"
    assert not card.class_names or len(card.class_names) == len(set(card.class_names)) == card.classes
    assert all(a < b for a, b in pairwise(card.class_names))  # as folders are numbered
    assert set(card.counts) <= set(card.domains)
    for domain, counts in card.counts.items():
        assert len(counts) == card.classes
        assert sum(counts) == card.domains[domain]
    if name.endswith("-c"):
        assert tuple(card.domains) == CORRUPTIONS


def test_pacs_has_the_counts_of_each_class() -> None:
    assert set(CARDS["pacs"].counts) == {"art_painting", "cartoon", "photo", "sketch"}
    assert sum(counts[-1] for counts in CARDS["pacs"].counts.values()) == 449 + 405 + 432 + 160  # people


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("pasc", "pacs"), ("office-home", "officehome"), ("domain-net", "domainnet"), ("cifar10c", "cifar10-c")],
)
def test_an_unknown_name_is_refused_with_the_nearest(tmp_path: Path, wrong: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"no dataset is called '{wrong}'. Did you mean '{right}'?"):
        get_card(wrong)
    with pytest.raises(ValueError, match=f"Did you mean '{right}'?"):
        open_dataset(wrong, tmp_path)


def test_a_name_like_none_is_refused_with_all_there_are() -> None:
    with pytest.raises(ValueError, match=r"There are: digits, .*imagenet-c, and folder") as error:
        get_card("xyz")
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("published", "right"),
    [("PACS", "pacs"), ("VLCS", "vlcs"), ("OfficeHome", "officehome"), ("DomainNet", "domainnet")],
)
def test_a_name_as_the_papers_spell_it_gets_its_hint(published: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"Did you mean '{right}'"):
        get_card(published)
