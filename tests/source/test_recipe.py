"""Recipes: their names, what they refuse, and the training that suits each dataset."""

from typing import Any

import pytest
from pydantic import ValidationError

from trueup.source.recipe import GivenModel, Recipe, Training, training_for

RECIPE: dict[str, Any] = {
    "dataset": "pacs",
    "data": "0123",
    "sources": ("art_painting", "cartoon"),
    "classes": 7,
    "network": "resnet18",
    "weights": "imagenet",
    "code": "",
    "seed": 1,
    "training": Training(),
}
OTHER_RECIPE: dict[str, Any] = {
    "dataset": "vlcs",
    "data": "4567",
    "sources": ("cartoon", "art_painting"),
    "classes": 8,
    "network": "resnet50",
    "weights": "none",
    "code": "sha256:1",
    "seed": 2,
    "training": Training(lr=1e-4),
}
OTHER_TRAINING: dict[str, Any] = {
    "algorithm": "swad",
    "iterations": 5001,
    "batch": 33,
    "lr": 5.0001e-5,
    "optimizer": "sgd",
    "weight_decay": 1e-4,
    "decay_at": (0.5,),
    "augment": "shift",
    "normalize": "half",
    "size": 225,
    "holdout": 0.25,
    "every": 301,
    "first": 101,
    "converge": 4,
    "tolerate": 7,
    "tolerance": 0.2,
    "refresh": 501,
    "multilabel": True,
    "resize": "crop",
    "range": (0.0, 4095.0),
    "grey": True,
}


# Names


def test_the_name_of_a_fixed_recipe_never_changes() -> None:
    """If it does, every checkpoint out there is trained anew."""
    assert Recipe(**RECIPE).name == "pacs-resnet18-erm-011910c79a7b6465"


def test_the_name_says_the_algorithm_and_is_fit_for_a_file() -> None:
    recipe = Recipe(**{**RECIPE, "network": "my_nets.small:net/2", "training": Training(algorithm="swad")})
    assert recipe.name == f"pacs-my-nets-small-net-2-swad-{recipe.digest()}"


def test_the_tests_know_every_field() -> None:
    assert OTHER_RECIPE.keys() == RECIPE.keys() == Recipe.model_fields.keys()
    assert OTHER_TRAINING.keys() == Training.model_fields.keys()


@pytest.mark.parametrize("field", OTHER_RECIPE)
def test_every_field_of_a_recipe_changes_its_hash(field: str) -> None:
    assert Recipe(**{**RECIPE, field: OTHER_RECIPE[field]}).digest() != Recipe(**RECIPE).digest()


@pytest.mark.parametrize("field", OTHER_TRAINING)
def test_every_field_of_the_training_changes_the_hash(field: str) -> None:
    training = Training(**{field: OTHER_TRAINING[field]})
    assert training.digest() != Training().digest()
    assert Recipe(**{**RECIPE, "training": training}).digest() != Recipe(**RECIPE).digest()


def test_the_hash_depends_on_values_alone_not_on_how_they_are_written() -> None:
    a = Training(lr=1, decay_at=[0.5, 0.7], iterations=10)
    b = Training(iterations=10, lr=1.0, decay_at=(0.5, 0.7), batch=32)
    assert a.digest() == b.digest()
    assert Recipe(**Recipe(**RECIPE).model_dump(mode="json")) == Recipe(**RECIPE)


@pytest.mark.parametrize("kind", [Training, GivenModel])
def test_a_classifier_says_nothing_of_labels(kind: type[Training | GivenModel]) -> None:
    """The field is younger than the files and records of classifiers, which keep their names."""
    base: dict[str, Any] = {Training: {}, GivenModel: {"checkpoint": "sha256:0"}}[kind]
    assert "multilabel" not in kind(**base).model_dump(mode="json")
    assert kind(**base).digest() == kind(**base, multilabel=False).digest()
    assert kind(**base, multilabel=True).model_dump(mode="json")["multilabel"] is True
    for value in (False, True):
        made = kind(**base, multilabel=value)
        assert kind(**made.model_dump(mode="json")) == made
    assert "multilabel" not in Recipe(**RECIPE).model_dump(mode="json")["training"]


# What is refused


@pytest.mark.parametrize("kind", [Training, GivenModel, Recipe])
def test_unknown_names_are_refused(kind: type[Training | GivenModel | Recipe]) -> None:
    base: dict[str, Any] = {Training: {}, GivenModel: {"checkpoint": "sha256:0"}, Recipe: RECIPE}[kind]
    with pytest.raises(ValidationError, match="learning_rate"):
        kind(**base, learning_rate=1.0)


@pytest.mark.parametrize("parts", [(0.9, 0.7), (0.0,), (1.0,), (-0.1, 0.5), (0.5, 1.5)])
def test_decay_outside_or_out_of_order_is_refused(parts: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError, match="rising parts between 0 and 1"):
        Training(decay_at=parts)


@pytest.mark.parametrize("parts", [(), (0.5,), (0.7, 0.9)])
def test_rising_parts_are_taken(parts: tuple[float, ...]) -> None:
    assert Training(decay_at=parts).decay_at == parts


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("iterations", -1), ("batch", 0), ("lr", 0), ("lr", float("nan")), ("lr", float("inf")), ("weight_decay", -1),
        ("size", 7), ("holdout", 0), ("holdout", 1), ("every", 0), ("first", 0), ("converge", 0), ("tolerate", 0),
        ("tolerance", -0.1), ("refresh", -1), ("algorithm", "sam"), ("optimizer", "rmsprop"), ("augment", "cutmix"),
        ("normalize", "mean"),
    ],
)  # fmt: skip
def test_values_without_a_meaning_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        Training(**{field: value})


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Training().lr = 1.0  # type: ignore[misc]


def test_a_recipe_without_source_domains_is_refused() -> None:
    """There would be nothing to train on, and the network would be kept as it started."""
    with pytest.raises(ValidationError, match="sources"):
        Recipe(**{**RECIPE, "sources": ()})


# Presets


def test_the_paper_is_the_default() -> None:
    t = training_for("pacs")
    assert t == Training() == training_for("folder") == training_for("office-home", {})
    assert (t.algorithm, t.optimizer, t.lr, t.weight_decay, t.decay_at) == ("erm", "adam", 5e-5, 0.0, ())
    assert (t.iterations, t.batch, t.holdout, t.first, t.every, t.size) == (5000, 32, 0.2, 100, 300, 224)
    assert (t.augment, t.normalize) == ("domainbed", "imagenet")
    assert (t.converge, t.tolerate, t.tolerance, t.refresh) == (3, 6, 0.3, 500)


@pytest.mark.parametrize(
    ("dataset", "values"),
    [
        ("domainnet", {"iterations": 15_000, "lr": 5e-5, "batch": 32}),
        ("imagenet-c", {"iterations": 0, "size": 224}),
        ("digits", {"iterations": 450, "batch": 16, "lr": 3e-3, "augment": "none", "normalize": "half", "size": 32}),
        ("digits-c", {"iterations": 450, "batch": 48, "lr": 3e-3, "augment": "none", "normalize": "half", "size": 32}),
        (
            "cifar10-c",
            {"optimizer": "sgd", "lr": 0.1, "weight_decay": 5e-4, "batch": 128, "decay_at": (2 / 3, 13 / 15)},
        ),
        ("cifar100-c", {"augment": "shift", "holdout": 0.1, "size": 32, "iterations": 29_250, "every": 1950}),
    ],
)
def test_presets_of_the_datasets(dataset: str, values: dict[str, Any]) -> None:
    training = training_for(dataset).model_dump()
    assert {name: training[name] for name in values} == values


def test_what_is_given_stands_before_the_preset() -> None:
    training = training_for("digits", {"lr": 1e-2, "size": 16})
    assert (training.lr, training.size, training.iterations) == (1e-2, 16, 450)
    with pytest.raises(ValidationError, match="rate"):
        training_for("digits", {"rate": 1})


@pytest.mark.parametrize(
    ("dataset", "every", "tolerance"),
    [("pacs", 100, 0.3), ("folder", 100, 0.3), ("vlcs", 50, 0.2), ("domainnet", 500, 0.3), ("digits", 25, 0.3)],
)
def test_swad_validates_as_its_authors_did_on_each_dataset(dataset: str, every: int, tolerance: float) -> None:
    training = training_for(dataset, {"algorithm": "swad"})
    assert (training.every, training.first, training.tolerance) == (every, every, tolerance)
    assert training.iterations == training_for(dataset).iterations


def test_swad_of_a_dataset_follows_the_same_beginning_as_its_preset() -> None:
    """digits-c trains for 450 iterations as digits does: five validations would be too few for SWAD."""
    assert training_for("digits-c", {"algorithm": "swad"}).every == training_for("digits", {"algorithm": "swad"}).every


def test_swad_takes_what_is_given() -> None:
    training = training_for("vlcs", {"algorithm": "swad", "tolerance": 0.5, "first": 7, "every": 9})
    assert (training.tolerance, training.first, training.every) == (0.5, 7, 9)


def test_swad_with_a_given_interval_closes_its_first_segment_after_that_interval() -> None:
    training = training_for("pacs", {"algorithm": "swad", "every": 20})
    assert training.first == training.every == 20


def test_without_swad_its_intervals_are_not_taken() -> None:
    assert training_for("vlcs", {"algorithm": "erm"}) == Training()
