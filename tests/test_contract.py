"""Every registered method keeps the shipped contract."""

import pytest
from small import SMALL

import trueup
from trueup.testing import CHECKS, Case, SkipCheck, kinds

BATCH = {"memo": 8}  # one image after the other, each with views and a fresh start

# These checks run at the defaults: two judge a method as users get it, and one shows that the defaults run at all.
AT_DEFAULTS = {"not_worse_than_source", "unwrapped_answers_alike", "output"}
# An update in the middle of a batch learns from the images before it; at the defaults none comes in two batches.
NO_UPDATE = {("note", "permutation"), ("rotta", "permutation")}

# Strict: a check that starts to pass must leave this list.
EXPECTED_FAILURES = {
    ("lame", "not_worse_than_source"): "LAME assumes neighbours share a class; on i.i.d. batches it merges classes",
    ("tent-prebn", "lr_zero_is_the_plain_forward"): "its BatchNorm layer changes the answers before anything is learnt",
    ("tent-prebn", "only_selected_change"): "by default it trains a layer of its own and nothing of the model",
    ("roid", "lr_zero_is_the_plain_forward"): "it corrects the answers by the classes' shares in the batch",
    ("roid", "permutation"): "views are drawn at random, and others when the order is another",
    ("memo", "normalisation"): "each image starts at the source, so no statistics are ever kept",
    ("memo", "only_selected_change"): "after each image the weights are the source's again",
    ("note", "normalisation"): "where an update comes inside a batch its two parts are taken in turn, each with a move",
    ("note", "episodic_forgets"): "a batch that is taken in parts is forgotten after each of them, not as a whole",
    ("rotta", "episodic_forgets"): "a batch that is taken in parts is forgotten after each of them, not as a whole",
    ("rotta", "normalisation"): "its statistics move to those of its memory, once in 64 images",
    ("cotta", "lr_zero_is_the_plain_forward"): "the answer is the mean over views where the source is unsure",
    ("cotta", "permutation"): "views are drawn at random, and others when the order is another",
    ("cotta", "not_worse_than_source"): "its views are mirrored, and a mirrored grating is of another class",
    ("tast", "lr_zero_is_the_plain_forward"): "the answer is what the projections say of the nearest supports",
    ("tast", "only_selected_change"): "by default it trains projections of its own and nothing of the model",
    ("tast-bn", "lr_zero_is_the_plain_forward"): "the answer is that of the nearest images that are kept",
    ("tast-bn", "only_selected_change"): "its loss is one of features, so that params='head' has nothing to learn from",
    ("adacontrast", "normalisation"): "its estimates move to those of weak views, not of the images themselves",
    ("adacontrast", "permutation"): "views are drawn at random, and others when the order is another",
}


PAPER = ("source", "bn", "tent", "pl", "shot-im", "t3a", "eta", "lame", "tsd")  # the table of TSD's paper
PAIRS = [
    pytest.param(name, kind, marks=() if name in PAPER else pytest.mark.beyond_quick)
    for task in ("classification", "segmentation")
    for name in trueup.list_methods(task)
    for kind in kinds(trueup.get_method(name, task))
    if (kind == "classification") == (task == "classification")
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("name", "kind"), PAIRS, ids=lambda value: value)
def test_method_keeps_contract(name: str, kind: str, check: str, request: pytest.FixtureRequest) -> None:
    reason = EXPECTED_FAILURES.get((name, check))
    if reason is not None:
        request.applymarker(pytest.mark.xfail(reason=reason, raises=AssertionError, strict=True))
    task = "classification" if kind == "classification" else "segmentation"
    defaults = check in AT_DEFAULTS or (name, check) in NO_UPDATE
    hyper = {} if defaults else SMALL.get((name, task), {})
    try:
        CHECKS[check](Case(trueup.get_method(name, task), hyper, kind, BATCH.get(name, 24)))
    except SkipCheck as skip:
        pytest.skip(str(skip))
