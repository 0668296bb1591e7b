"""Settings that are refused, and how."""

from typing import Any

import pytest
from toy_settings import runs

from trueup.bench.settings import make_sweep


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"taget": "hand"}, "'taget'.* Did you mean 'target'"),
        ({"seeds": 0}, "'seeds'.* Did you mean 'seed'"),
        ({"training": {"iteration": 5}}, "'iteration'.* Did you mean 'iterations'"),
        ({"training": {"learning_rate": 5}}, "'learning_rate'.* There are: algorithm, iterations"),
        ({"dataset": "digit"}, "'digit'.* Did you mean 'digits'"),
        ({"target": "hamd"}, "'hamd'.* Did you mean 'hand'"),
        ({"target": ["hand", "type+noen"]}, "'noen'.* Did you mean 'neon'"),
        ({"dataset": "digits-c", "target": "frog-3"}, "'frog'.* Did you mean '(fog|frost)'"),
        ({"method": "tsdd"}, "'tsdd'.* Did you mean 'tsd'"),
        ({"method": {"tsd": {"neigbors": 1}}}, "'neigbors'; did you mean 'neighbors'"),
        ({"method": {"source": {"lr": 1}}}, "source has no hyper-parameter 'lr'"),
        ({"select": "sourse"}, "'sourse'"),
    ],
)
def test_unknown_name_is_refused_with_the_right_one(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runs(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stream": "idd"}, "'idd'.* 'iid'"),
        ({"stream": "dirichlet", "stream_options": {"concentrate": 1}}, "'concentrate'.* 'concentration'"),
        ({"network": "digitsnet"}, "'digitsnet'.* 'digits-net'"),
        ({"dataset": "digits-c", "target": "fog-9"}, "fog-9"),
        ({"target": "hand+neon", "stream": "iid"}, "iid takes one domain"),
        ({"target": "hand+type+poster+neon", "stream": "mixed"}, "leave at least one"),
    ],
)
def test_mistake_that_would_fail_every_run_is_found_before_anything_starts(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        runs(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": -1}, "seed.*greater than or equal to 0.*-1"),
        ({"seed": 1.5}, "seed.*1.5"),
        ({"seed": "one"}, "seed.*'one'"),
        ({"seed": []}, "seed"),
        ({"batch": 0}, "batch.*0"),
        ({"limit": 0}, "limit.*0"),
        ({"reset": "perhaps"}, "reset.*'perhaps'"),
        ({"dataset": []}, "dataset"),
        ({"dataset": {"digits": 1}}, "dataset"),
        ({"method": []}, "method"),
        ({"method": 5}, "a method is a name, or `name: {lr: 0.001}`, not 5"),
        ({"method": {"tsd": None}}, "write hyper-parameters as `tsd: {lr: 0.001}`, not None"),
        ({"method": {"tsd": {}, "tent": {}}}, "a method is a name"),
        ({"method": {"tsd": {"lr": -1}}}, "lr=-1"),
        ({"method": {"tsd": {"lr": "fast"}}}, "lr='fast'"),
        ({"method": {"tsd": {"lr": "nan"}}}, "lr=nan"),
        ({"method": {"tsd": {"per_class": 0}}}, "per_class=0"),
        ({"stream_options": 3}, "stream_options.*3"),
        ({"training": {"lr": -1}}, "lr.*-1"),
        ({"training": {"algorithm": "magic"}}, "algorithm.*'magic'"),
        ({"training": {"decay_at": [0.9, 0.1]}}, "decay_at must be rising"),
        ({"training": "fast"}, "training.*'fast'"),
        ({"training": 5}, "training.*5"),
        ({"dataset": "pacs"}, "pacs is not embedded: give its folder"),
        ({"dataset": "pacs", "root": "/does/not/exist"}, "/does/not/exist is not a folder"),
        ({"weights": "/does/not/exist.pt"}, "/does/not/exist.pt"),
        ({"checkpoint": "/does/not/{target}.pt"}, "/does/not/hand.pt"),
        ({"checkpoint": "/does/not/{domain}.pt"}, "domain"),
    ],
)
def test_wrong_value_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        runs(**values)


@pytest.mark.parametrize("values", [{"training": {"lr": -1}}, {"training": {"decay_at": [0.9, 0.1]}}])
def test_wrong_value_of_training_is_named_with_its_group(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^training"):
        make_sweep(values)
