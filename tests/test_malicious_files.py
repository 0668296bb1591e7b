"""Files that were made to harm, or were harmed, against every reader: an error that we foresee, and nothing else."""

import copy
import hashlib
import io
import json
import pickle
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

import trueup
from trueup.bench.records import finished_records, read_records
from trueup.bench.settings import make_sweep, read_settings
from trueup.core import files
from trueup.data.datasets import cifar
from trueup.data.datasets import mask_folders as masks
from trueup.data.pictures import decode
from trueup.data.volumes import read_volume
from trueup.deploy.folder_images import JOURNAL
from trueup.deploy.run_log import FORMAT, RunLog
from trueup.source import checkpoints
from trueup.source import external_checkpoints as foreign
from trueup.source import train as training
from trueup.source.networks import build_network
from trueup.source.recipe import Recipe, Training
from trueup.testing import convnet, images
from trueup.testing.case import difference

X = images(16, seed=0, shift=1.0)[0]
SETTINGS = {"method": "tsd"}
RECIPE = Recipe(dataset="made-up", sources=("a",), classes=3, network="digits-net", training=Training(size=8))
DEEP = "[" * 100_000 + "]" * 100_000
REFUSED = (ValueError, OSError)


def adapter() -> trueup.Adapter:
    return trueup.adapt(convnet(), "tsd")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What an adapter saves after a batch."""
    used = adapter()
    used(X)
    path = tmp_path_factory.mktemp("state") / "state"
    used.save(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def used() -> trueup.Adapter:
    """An adapter that has something to lose."""
    victim = adapter()
    for seed in (1, 2):
        victim(images(16, seed=seed, shift=1.0)[0])
    return victim


def signed(tensors: dict[str, Tensor], header: Any, kind: str = "adapter") -> bytes:
    """A file with a hash that fits: whoever forges a file can do that too."""
    text = header if isinstance(header, str) else json.dumps(header)
    blob = save(tensors, {"format": f"trueup-{kind}-1", "header": text, "sha256": "0" * 64})
    return blob.replace(b"0" * 64, hashlib.sha256(blob).hexdigest().encode(), 1)


def assert_refuses(victim: trueup.Adapter, path: Path) -> None:
    """An error that we foresee; the adapter stays what it is, to the bit."""
    before = copy.deepcopy(victim)
    try:
        with pytest.raises(REFUSED):
            victim.load(path)
        assert difference(before, victim) == []
    finally:
        victim.__dict__ = before.__dict__


# Code in files


class Evil:
    """Would make a file when an ordinary reader of pickles meets it."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


def payloads(canary: Path) -> dict[str, bytes]:
    made = {f"pickle {protocol}": pickle.dumps(Evil(canary), protocol) for protocol in (0, 2, 5)}
    for name, zipped in (("torch", True), ("old torch", False)):
        buffer = io.BytesIO()
        content = {"state_dict": build_network("digits-net", 3).state_dict(), "args": Evil(canary)}
        torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
        made[name] = buffer.getvalue()
    buffer = io.BytesIO()
    np.save(buffer, np.array([Evil(canary)], dtype=object), allow_pickle=True)
    return made | {"numpy": buffer.getvalue(), "json": b'{"a": 1}' + pickle.dumps(Evil(canary))}


def test_the_payloads_are_harmful(tmp_path: Path) -> None:
    """To readers that trust them; or else no test here shows anything."""
    canary = tmp_path / "canary"
    ordinary: dict[str, Callable[[bytes], Any]] = {
        "pickle": pickle.loads,
        "torch": lambda blob: torch.load(io.BytesIO(blob), weights_only=False),
        "old torch": lambda blob: torch.load(io.BytesIO(blob), weights_only=False),
        "numpy": lambda blob: np.load(io.BytesIO(blob), allow_pickle=True),
        "json": lambda blob: pickle.loads(blob[8:]),
    }
    for name, blob in payloads(canary).items():
        next(read for kind, read in ordinary.items() if name.startswith(kind))(blob)
        assert canary.exists(), name
        canary.unlink()


def read_array(path: Path) -> Any:
    (path.parent / "fog.npy").write_bytes(path.read_bytes())
    np.save(path.parent / "labels.npy", np.zeros(5 * cifar.ROWS, dtype=np.int64))
    return cifar.cifar_domain("cifar10-c", path.parent, "fog")


def read_labels(path: Path) -> Any:
    head = {"descr": "|u1", "fortran_order": False, "shape": (5 * cifar.ROWS, 32, 32, 3)}
    with (path.parent / "fog.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, head)
        file.truncate(file.tell() + 5 * cifar.ROWS * 3072)  # a hole: it takes no room
    (path.parent / "labels.npy").write_bytes(path.read_bytes())
    return cifar.cifar_domain("cifar10-c", path.parent, "fog")


def write_journal(folder: Path, content: bytes) -> Path:
    (folder / JOURNAL).parent.mkdir(parents=True, exist_ok=True)
    (folder / JOURNAL).write_bytes(content)
    return folder


def read_journal(path: Path) -> Any:
    return RunLog(write_journal(path.parent / "out", path.read_bytes()), SETTINGS, fresh=False)


def read_journal_state(path: Path) -> Any:
    content = {"format": FORMAT, "settings": SETTINGS, "state": "state-1.safetensors", "saves": 1, "done": {}}
    out = write_journal(path.parent / "out", json.dumps(content).encode())
    (out / JOURNAL).with_name("state-1.safetensors").write_bytes(path.read_bytes())
    RunLog(out, SETTINGS, fresh=False).load(adapter())


READERS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "an adapter's state": (lambda path: adapter().load(path), ("state", "x.pt", "x.safetensors")),
    "our checkpoint": (checkpoints.read_checkpoint, ("x.safetensors", "x.pt")),
    "the header of our checkpoint": (checkpoints.read_header, ("x.safetensors",)),
    "any checkpoint": (lambda path: checkpoints.load_model(path, "digits-net", 3, 8), ("x.pt", "x.safetensors")),
    "a foreign checkpoint": (foreign.read_external, ("x.pt", "x.pth", "x.ckpt", "x.safetensors", "x")),
    "weights": (lambda path: build_network("digits-net", 3, weights=str(path)), ("x.pt", "x.pth", "x.safetensors")),
    "a journal": (read_journal, ("x",)),
    "the state of a journal": (read_journal_state, ("x",)),
    "a sweep": (lambda path: make_sweep(read_settings(path, {})), ("x.yaml",)),
    "an array": (read_array, ("x",)),
    "labels": (read_labels, ("x",)),
    "an image": (decode, ("x.png", "x.jpg", "x.tif")),
    "an image with masks": (masks.read_image, ("x.png", "x.nii.gz", "x.mha")),
    "a volume": (read_volume, ("x.nii", "x.nii.gz", "x.mha", "x.mhd", "x.nrrd")),
}


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_runs_what_is_in_a_file(reader: str, tmp_path: Path) -> None:
    read, names = READERS[reader]
    canary = tmp_path / "canary"
    for payload, blob in payloads(canary).items():
        for name in names:
            (tmp_path / name).write_bytes(blob)
            with pytest.raises(REFUSED):
                read(tmp_path / name)
            assert not canary.exists(), f"{payload} as {name}"


def test_records_leave_out_what_is_no_record(tmp_path: Path) -> None:
    """A file of records only grows, and a kill may cut a line short: what is no record is no reason to stop."""
    canary = tmp_path / "canary"
    good = b'{"id": "a", "settings": {}, "results": {}}\n'
    for blob in (*payloads(canary).values(), good[:-20], b'{"id": "b", "settings"' + b"\0" * 100):
        (tmp_path / "records.jsonl").write_bytes(blob + b"\n" + good)
        assert [record["id"] for record in read_records(tmp_path)] == ["a"]
        assert not canary.exists()


# Damage to the state of an adapter


@pytest.mark.parametrize("victim", ["fresh", "used"])
def test_a_state_that_was_cut_off(victim: str, state: bytes, used: trueup.Adapter, tmp_path: Path) -> None:
    for eighth in range(8):
        (tmp_path / "state").write_bytes(state[: len(state) * eighth // 8])
        assert_refuses(used if victim == "used" else adapter(), tmp_path / "state")


def test_a_state_with_a_flipped_byte(state: bytes, used: trueup.Adapter, tmp_path: Path) -> None:
    """Refused; a flip that is taken must be one that changes nothing."""
    path, good, taken = tmp_path / "state", adapter(), 0
    path.write_bytes(state)
    good.load(path)
    before = copy.deepcopy(used)
    for at in sorted({*range(80), *range(0, len(state), len(state) // 150), len(state) - 1}):
        path.write_bytes(state[:at] + bytes([state[at] ^ (1 << at % 8)]) + state[at + 1 :])
        victim = copy.deepcopy(before)
        try:
            victim.load(path)
        except REFUSED:
            assert difference(before, victim) == [], at
        else:
            assert difference(good, victim) == [], at
            taken += 1
    assert taken < 5


# Headers of safetensors files


ONE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
HEADERS = {
    "empty": b"",
    "no JSON": b"hello, world",
    "no UTF-8": b'{"\xff\xfe":1}',
    "no object": b"[1, 2]",
    "a number": b"1",
    "not finished": ONE[:-3],
    "deep": DEEP.encode(),
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep metadata": b'{"__metadata__":' + DEEP.encode() + b"}",
    "metadata is a list": b'{"__metadata__":[]}',
    "metadata without text": b'{"__metadata__":{"format":"trueup-adapter-1","sha256":3}}',
    "a hash of nothing": b'{"__metadata__":{"format":"trueup-adapter-1","sha256":""}}',
    "a tensor is a number": b'{"a":1}',
    "beyond the end": ONE.replace(b"[0,4]", b"[0,4000000000]").replace(b"[1]", b"[1000000000]"),
    "backwards": ONE.replace(b"[0,4]", b"[4,0]"),
    "negative": ONE.replace(b"[1]", b"[-1]"),
    "more than there is": ONE.replace(b"[1]", b"[4294967296,4294967296]"),
    "of no type": ONE.replace(b"F32", b"Object"),
    "a long number": ONE.replace(b"[1]", b"[" + b"9" * 10_000 + b"]"),
}
SAFETENSORS = ("an adapter's state", "our checkpoint", "any checkpoint", "a foreign checkpoint", "weights")


@pytest.mark.parametrize("reader", [*SAFETENSORS, "the state of a journal"])
@pytest.mark.parametrize("header", HEADERS)
def test_headers_that_make_no_sense(header: str, reader: str, tmp_path: Path) -> None:
    path, text = tmp_path / "x.safetensors", HEADERS[header]
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(REFUSED):
        READERS[reader][0](path)


@pytest.mark.parametrize("reader", SAFETENSORS)
@pytest.mark.parametrize("length", [0, 1, len(ONE) + 5, 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1])
def test_headers_of_a_length_that_is_not_there(length: int, reader: str, tmp_path: Path) -> None:
    """Nothing is allocated that the file does not hold."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + ONE + bytes(4))
    with pytest.raises(REFUSED):
        READERS[reader][0](path)


# States that were forged, with a hash that fits


Forge = Callable[[dict[str, Tensor], dict[str, Any]], tuple[dict[str, Tensor], Any]]


def with_header(**values: Any) -> Forge:
    return lambda tensors, header: (tensors, {**header, **values})


def without(name: str) -> Forge:
    return lambda tensors, header: (tensors, {key: value for key, value in header.items() if key != name})


def with_tensor(name: str, tensor: Tensor) -> Forge:
    return lambda tensors, header: ({**tensors, name: tensor}, header)


FORGED: dict[str, Forge] = {
    "the header is a list": lambda tensors, header: (tensors, []),
    "the header is nothing": lambda tensors, header: (tensors, None),
    "the header is no JSON": lambda tensors, header: (tensors, "{"),
    "the header is deep": lambda tensors, header: (tensors, DEEP),
    "the header is empty": lambda tensors, header: (tensors, {}),
    "no head": without("head"),
    "no counts": without("batches"),
    "no identity": without("source"),
    "a head that is not there": with_header(head="conv9"),
    "a head that is a number": with_header(head=3),
    "classes that are a text": with_header(classes="6"),
    "fewer classes than none": with_header(classes=-1),
    "a task that nobody knows": with_header(task="cooking"),
    "counts that are a text": with_header(batches="many"),
    "an optimiser that is a list": with_header(optimizer=[1]),
    "prepared, without what was prepared": with_header(prepared=True),
    "a part that nobody knows": with_tensor("evil/x", torch.zeros(2)),
    "a tensor of no part": with_tensor("x", torch.zeros(2)),
    "a parameter that nobody knows": with_tensor("net/x", torch.zeros(2)),
    "a parameter of another shape": with_tensor("net/head.bias", torch.zeros(7)),
    "a parameter of another type": with_tensor("net/head.bias", torch.zeros(6, dtype=torch.int64)),
    "a random state that is too short": with_tensor("random/cpu", torch.zeros(3, dtype=torch.uint8)),
    "moments of a parameter that is not there": with_tensor("optimizer/999/exp_avg", torch.zeros(2)),
    "moments of a parameter before the first": with_tensor("optimizer/-1/exp_avg", torch.zeros(2)),
    "moments that are too short": with_tensor("optimizer/0/exp_avg", torch.zeros(1)),
    "moments of another type": with_tensor("optimizer/1/exp_avg", torch.zeros(16, dtype=torch.int64)),
    "a count of steps that is a row": with_tensor("optimizer/0/step", torch.zeros(2)),
    "a moment that nobody knows": with_tensor("optimizer/0/evil", torch.zeros(2)),
    "memory of another length": with_tensor("state/entropy", torch.zeros(3)),
    "not all moments": lambda tensors, header: (
        {name: t for name, t in tensors.items() if name != "optimizer/0/exp_avg_sq"},
        header,
    ),
}


NOT_ASKED = {"a head that is not there", "a head that is a number"} | {
    name for name in FORGED if name.startswith(("classes", "fewer classes", "a task"))
}  # once an adapter is built it has them


@pytest.mark.parametrize("forgery", list(FORGED))
def test_a_forged_state(forgery: str, state: bytes, tmp_path: Path) -> None:
    """Refused at once: what is taken may write beyond its memory with the next step."""
    (tmp_path / "state").write_bytes(state)
    (tmp_path / "state").write_bytes(signed(*FORGED[forgery](*files.read(tmp_path / "state"))))
    assert_refuses(adapter(), tmp_path / "state")


@pytest.mark.parametrize("forgery", sorted(FORGED.keys() - NOT_ASKED))
def test_a_forged_state_and_an_adapter_in_use(forgery: str, state: bytes, used: trueup.Adapter, tmp_path: Path) -> None:
    """It goes on with what it had."""
    (tmp_path / "state").write_bytes(state)
    (tmp_path / "state").write_bytes(signed(*FORGED[forgery](*files.read(tmp_path / "state"))))
    assert_refuses(used, tmp_path / "state")


# Checkpoints of source models


def with_recipe(**values: Any) -> dict[str, Any]:
    return {"recipe": {**RECIPE.model_dump(mode="json"), **values}, "report": {}}


CHECKPOINTS: dict[str, Any] = {
    "the header is a list": [],
    "the header is nothing": None,
    "the header is no JSON": "{",
    "the header is deep": DEEP,
    "no recipe": {"report": {}},
    "a recipe that is nothing": {"recipe": None, "report": {}},
    "a recipe that is a text": {"recipe": "digits", "report": {}},
    "a recipe of nothing": {"recipe": {}, "report": {}},
    "a recipe with more": with_recipe(evil=1),
    "no classes": with_recipe(classes=0),
    "other classes": with_recipe(classes=4),
    "a network that nobody knows": with_recipe(network="evil"),
    "a network of no name": with_recipe(network=""),
    "another network": with_recipe(network="small-unet"),
    "a function that takes nothing": with_recipe(network="os:getpid"),
    "a function that gives no network": with_recipe(network="math:sqrt"),
}


@pytest.mark.parametrize("forgery", CHECKPOINTS)
def test_a_forged_checkpoint(forgery: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(signed(build_network("digits-net", 3).state_dict(), CHECKPOINTS[forgery], "source"))
    with pytest.raises(REFUSED):
        checkpoints.read_checkpoint(path)
    with pytest.raises(REFUSED):
        checkpoints.load_model(path, "digits-net", 3, 8)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint whose network is a function in the current folder; whoever imports it leaves a trace."""
    monkeypatch.chdir(tmp_path)
    made = "def make(classes):\n    from trueup.source.networks import build_network\n"
    made += "    return build_network('digits-net', classes)\n"
    Path("planted_network.py").write_text(f"from pathlib import Path\nPath('canary').touch()\n{made}")
    forged = with_recipe(network="planted_network:make")
    Path("x.safetensors").write_bytes(signed(build_network("digits-net", 3).state_dict(), forged, "source"))
    yield tmp_path / "x.safetensors"
    sys.modules.pop("planted_network", None)


@pytest.mark.parametrize("named", [None, "digits-net", "planted_network:other"])
def test_a_checkpoint_does_not_choose_what_runs(named: str | None, planted: Path) -> None:
    """A recipe may name a function of a user's own; a file from elsewhere must not have it imported and called."""
    with pytest.raises(ValueError, match="--network or --arch planted_network:make"):
        checkpoints.read_checkpoint(planted, named)
    store = checkpoints.Store(planted.parent)
    planted.rename(store.path(RECIPE))
    with pytest.raises(ValueError, match="another recipe"):
        store.load(RECIPE)
    assert not Path("canary").exists()


def test_a_function_of_a_users_own_runs_where_the_user_names_it(planted: Path) -> None:
    model, _ = checkpoints.read_checkpoint(planted, "planted_network:make")
    assert Path("canary").exists()
    tensors, _ = files.read(planted, "source")
    recipe, store = RECIPE.model_copy(update={"network": "planted_network:make"}), checkpoints.Store(planted.parent)
    store.path(recipe).write_bytes(planted.read_bytes())
    again = checkpoints.load_model(planted, "planted_network:make", 3, 8)
    for loaded in (model, again, store.load(recipe)[0]):
        assert all(torch.equal(tensors[name], tensor) for name, tensor in loaded.state_dict().items())


def test_a_checkpoint_does_not_choose_what_is_downloaded(tmp_path: Path) -> None:
    """Encoders of timm may be addresses."""
    forged = with_recipe(network="smp:unet/tu-hf-hub:somebody/something")
    (tmp_path / "x").write_bytes(signed(build_network("digits-net", 3).state_dict(), forged, "source"))
    with pytest.raises(ValueError, match="would have to be imported and run"):
        checkpoints.read_checkpoint(tmp_path / "x")


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda weight: weight.to_sparse(),
    "compressed": lambda weight: weight.to_sparse_csr(),
    "nowhere": lambda weight: weight.to("meta"),
    "quantized": lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
    "complex": lambda weight: weight.to(torch.complex64),
}


@pytest.mark.filterwarnings("ignore")  # or a warning of torch would refuse the file here, and only here
@pytest.mark.parametrize("odd", ODD)
def test_foreign_tensors_of_an_odd_kind_leave_the_model_alone(odd: str, tmp_path: Path) -> None:
    model, theirs = build_network("digits-net", 3), build_network("digits-net", 3).state_dict()
    weight = theirs["head.weight"]
    theirs["head.weight"] = ODD[odd](weight)
    torch.save(theirs, tmp_path / "x.pt")
    with pytest.raises(REFUSED):
        build_network("digits-net", 3, weights=str(tmp_path / "x.pt"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        foreign.load_external(tmp_path / "x.pt", model, torch.zeros(2, 3, 8, 8))
    except REFUSED:
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    else:
        assert torch.equal(model.state_dict()["head.weight"], weight)


def test_foreign_settings_may_be_as_deep_as_they_like(tmp_path: Path) -> None:
    """A pickle of lists in lists, which takes a byte for each to write."""
    torch.save({"state_dict": build_network("digits-net", 3).state_dict(), "args": []}, tmp_path / "flat.pt")
    with zipfile.ZipFile(tmp_path / "flat.pt") as flat, zipfile.ZipFile(tmp_path / "x.pt", "w") as deep:
        for name in flat.namelist():
            blob, found = re.subn(rb"(argsq.\]q.)", rb"\1" + b"]" * 20_000 + b"a" * 20_000, flat.read(name))
            assert found == name.endswith("data.pkl")
            deep.writestr(name, blob)
    model = build_network("digits-net", 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(REFUSED, match=r"x\.pt"):
        foreign.load_external(tmp_path / "x.pt", model, torch.zeros(2, 3, 8, 8))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_foreign_settings_may_hold_the_same_list_many_times(tmp_path: Path) -> None:
    """Fifty lists, each twice in the next: a look at every one of them in its place would never end."""
    laugh: list[Any] = [1]
    for _ in range(50):
        laugh = [laugh, laugh]
    torch.save({"state_dict": build_network("digits-net", 3).state_dict(), "args": laugh}, tmp_path / "x.pt")
    assert "args" in foreign.load_external(tmp_path / "x.pt", build_network("digits-net", 3), torch.zeros(2, 3, 8, 8))


def with_swad(**values: Any) -> Forge:
    return lambda tensors, header: (tensors, {**header, "swad": {**header["swad"], **values}})


UNFINISHED: dict[str, Forge] = {
    "the header is a list": lambda tensors, header: (tensors, []),
    "the header is deep": lambda tensors, header: (tensors, DEEP),
    "no recipe": without("recipe"),
    "no step": without("done"),
    "a step that is a text": with_header(done="3"),
    "moments that are too short": with_tensor("optimizer/0.exp_avg", torch.zeros(1)),
    "moments of a parameter that is not there": with_tensor("optimizer/999.exp_avg", torch.zeros(1)),
    "a parameter of another shape": with_tensor("model/head.bias", torch.zeros(7)),
    "kept weights of another shape": with_tensor("kept/head.bias", torch.zeros(7)),
    "no kept weights": lambda tensors, header: (
        {name: t for name, t in tensors.items() if not name.startswith("kept/")},
        header,
    ),
    "a step before the first": with_header(done=-1),
    "a step beyond the last": with_header(done=5001),
    "a best that is a list": with_header(best=[0.5, 1]),
    "a best of no step": with_header(best={"score": 0.5}),
    "a history of texts": with_header(history=["a"]),
    "broken images without names": with_header(broken=[[]]),
    "moments of a parameter before the first": with_tensor("optimizer/-1.exp_avg", torch.zeros(2)),
    "moments of a parameter without a number": with_tensor("optimizer/head.exp_avg", torch.zeros(2)),
    "moments of another type": with_tensor("optimizer/0.exp_avg", torch.zeros(32, 3, 3, 3, dtype=torch.int64)),
    "a moment that nobody knows": with_tensor("optimizer/0.evil", torch.zeros(2)),
    "a count of steps that is a row": with_tensor("optimizer/0.step", torch.zeros(2)),
    "not all moments": lambda tensors, header: (
        {name: t for name, t in tensors.items() if name != "optimizer/0.exp_avg_sq"},
        header,
    ),
    "a part that nobody knows": with_tensor("evil/x", torch.zeros(2)),
    "an average of nothing": with_swad(count=1),
    "an average of less than nothing": with_swad(steps=-1),
    "an average of another shape": with_tensor("swad/segment.head.bias", torch.zeros(7)),
    "an average that waits for ever": with_swad(waiting=10**12),
    "an average without a loss": with_swad(losses=None),
}


def an_unfinished_run(model: torch.nn.Module, store: checkpoints.Store) -> training._TrainingRun:
    """After two steps, with SWAD at work and weights that are kept."""
    run: training._TrainingRun = training._TrainingRun(RECIPE, model, [], None)  # type: ignore[arg-type]
    for _ in range(2):
        run.model(torch.randn(4, 3, 8, 8)).sum().backward()
        run.optimizer.step()
        run.swad.step(dict(run.model.named_parameters()))
    run.done, run.best, run.best_at = 2, 0.5, 2
    run.kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run.save(store)
    return run


@pytest.mark.parametrize("forgery", UNFINISHED)
def test_a_forged_training_starts_anew(forgery: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, store = build_network("digits-net", 3), checkpoints.Store(tmp_path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    an_unfinished_run(model, store)
    file = store.partial(RECIPE)
    file.write_bytes(signed(*UNFINISHED[forgery](*files.read(file, "source")), "source"))
    model.load_state_dict(before)
    fresh: training._TrainingRun = training._TrainingRun(RECIPE, model, [], None)  # type: ignore[arg-type]
    fresh.restore(file)
    assert re.search(rf"training starts over: .*{re.escape(file.name)}", caplog.text)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert (fresh.done, fresh.kept, fresh.optimizer.state_dict()["state"]) == (0, {}, {})
    assert (fresh.swad.steps, fresh.swad.segment) == (0, {})


def test_a_training_that_nobody_forged_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Or else the refusals above show nothing."""
    model, store = build_network("digits-net", 3), checkpoints.Store(tmp_path)
    run = an_unfinished_run(model, store)
    fresh: training._TrainingRun = training._TrainingRun(RECIPE, build_network("digits-net", 3), [], None)  # type: ignore[arg-type]
    fresh.restore(store.partial(RECIPE))
    assert caplog.text == ""
    assert (fresh.done, fresh.best, fresh.best_at, fresh.swad.steps) == (2, 0.5, 2, 2)
    ours, theirs = fresh.optimizer.state_dict()["state"], run.optimizer.state_dict()["state"]
    assert all(torch.equal(ours[i][key], t) for i, moments in theirs.items() for key, t in moments.items())
    assert all(torch.equal(fresh.swad.segment[name], t) for name, t in run.swad.segment.items())
    assert all(torch.equal(fresh.kept[name], t) for name, t in run.kept.items())


# Journals


def journal(**values: Any) -> bytes:
    return json.dumps({"format": FORMAT, "settings": SETTINGS, "state": "", "saves": 0, "done": {}, **values}).encode()


JOURNALS = {
    "nothing": b"",
    "a list": b"[]",
    "a number": b"3",
    "no UTF-8": b'{"format": "\xff"}',
    "a long number": b'{"format": ' + b"9" * 10_000 + b"}",
    "deep": DEEP.encode(),
    "another format": journal(format=["trueup-segment-1"]),
    "settings that are a list": journal(settings=[]),
    "images that are a list": journal(done=["a.png"]),
    "a count that is a text": journal(saves="1"),
    "a state that is a number": journal(state=3),
    "a state that is a list": journal(state=["x"]),
}


@pytest.mark.parametrize("forgery", JOURNALS)
def test_a_forged_journal(forgery: str, tmp_path: Path) -> None:
    """Refused when it is read, or when the state that it names is."""
    with pytest.raises(REFUSED):
        RunLog(write_journal(tmp_path, JOURNALS[forgery]), SETTINGS, fresh=False).load(adapter())


@pytest.mark.parametrize("name", ["../state", "../../state", "{root}/state", "a/b", "..", ".", "a\0b", "x" * 5000])
def test_a_journal_names_no_file_elsewhere(name: str, state: bytes, tmp_path: Path) -> None:
    """Not even one that could be loaded."""
    (tmp_path / "out").mkdir()
    for folder in (tmp_path, tmp_path / "out"):
        (folder / "state").write_bytes(state)
    out = write_journal(tmp_path / "out", journal(state=name.format(root=tmp_path)))
    victim = adapter()
    with pytest.raises(REFUSED, match="--fresh"):
        RunLog(out, SETTINGS, fresh=False).load(victim)
    assert difference(adapter(), victim) == []


# Records


RECORDS = {
    "deep": DEEP,
    "deep settings": f'{{"id": "b", "settings": {DEEP}}}',
    "a list as a name": '{"id": [], "settings": {}}',
    "an object as a name": '{"id": {}, "settings": {}}',
    "a number as a name": '{"id": 3, "settings": {}}',
    "a list of settings": '{"id": "b", "settings": []}',
    "a long number": '{"id": "b", "settings": ' + "9" * 10_000 + "}",
    "half a character": '{"id": "\\ud800", "settings"',
}


@pytest.mark.parametrize("forgery", RECORDS)
def test_a_forged_record_is_left_out(forgery: str, tmp_path: Path) -> None:
    good = '{"id": "a", "settings": {}, "results": {}}'
    (tmp_path / "records.jsonl").write_text(f"{RECORDS[forgery]}\n{good}\n")
    assert [record["id"] for record in read_records(tmp_path)] == ["a"]
    assert list(finished_records(tmp_path)) == ["a"]


# Sweeps


SWEEPS = {
    "a call": "dataset: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [canary]]",
    "a command": "!!python/object/apply:os.system ['touch canary']",
    "an object": "dataset: !!python/object/new:os.system ['touch canary']",
    "a name": "dataset: !!python/name:os.system",
    "a module": "dataset: !!python/module:os",
    "a tuple": "dataset: !!python/tuple [digits]",
    "a tag of one's own": "dataset: !evil digits",
    "a list": "[digits]",
    "a list as a key": "? [dataset]\n: digits",
    "an object as a key": "? {dataset: 1}\n: digits",
    "itself": "dataset: &a [*a]",
    "a method that is itself": "method: &a [*a]",
    "a laugh": f"a: &a [{'x,' * 9}]\n" + "".join(f"{b}: &{b} [{f'*{a},' * 9}]\n" for a, b in pairwise("abcdefghi")),
    "a day that is none": "dataset: 2001-99-99",
    "a NUL": "dataset: a\0b",
    "a long number": "seed: " + "9" * 10_000,
    "deep": f"dataset: {DEEP}",
}


@pytest.mark.parametrize("forgery", SWEEPS)
def test_a_forged_sweep(forgery: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(SWEEPS[forgery])
    with pytest.raises(REFUSED):
        make_sweep(read_settings("x.yaml", {}))
    assert not Path("canary").exists()


# Arrays


def npy(header: bytes, version: int = 1) -> bytes:
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + header


LIKE = b"{'descr': '|u1', 'fortran_order': False, 'shape': (50000, 32, 32, 3)}"
ARRAYS = {
    "nothing": b"",
    "its beginning alone": b"\x93NUMPY",
    "code": npy(b"__import__('pathlib').Path('canary').touch()"),
    "code as a shape": npy(LIKE.replace(b"(50000, 32, 32, 3)", b"__import__('pathlib').Path('canary').touch()")),
    "a list": npy(b"[1]"),
    "objects": npy(LIKE.replace(b"|u1", b"|O")),
    "objects in fields": npy(LIKE.replace(b"'|u1'", b"[('a', '|u1'), ('b', '|O')]")),
    "no data": npy(LIKE),
    "a negative shape": npy(LIKE.replace(b"50000", b"-50000")),
    "more than there is": npy(LIKE.replace(b"50000", b"99999999999999999999")),
    "texts as a shape": npy(LIKE.replace(b"50000", b"'50000'")),
    "of no type": npy(LIKE.replace(b"|u1", b"zzz")),
    "of a type without size": npy(LIKE.replace(b"|u1", b"|V0")),
    "deep": npy(b"[" * 9000 + b"]" * 9000),
    "a deep number": npy(b"-" * 9000 + b"1"),
    "another version": npy(LIKE, version=9),
    "no UTF-8": npy(b"\xff\xfe", version=3),
    "a length that is not there": b"\x93NUMPY\x02\x00\xff\xff\xff\xff{",
}


@pytest.mark.parametrize("read", [read_array, read_labels])
@pytest.mark.parametrize("forgery", ARRAYS)
def test_a_forged_array(
    forgery: str, read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x").write_bytes(ARRAYS[forgery])
    with pytest.raises(ValueError, match=r"(fog|labels)\.npy"):
        read(tmp_path / "x")
    assert not Path("canary").exists()


@pytest.mark.parametrize(("name", "label"), [("cifar10-c", 10), ("cifar100-c", 100), ("cifar100-c", 255)])
def test_labels_that_are_no_class(name: str, label: int, tmp_path: Path) -> None:
    """In the last row of the last file."""
    good, bad = (bytes([*([0] * (name == "cifar100-c")), n]) + bytes(cifar.BYTES) for n in (label % 10, label))
    names = [f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)]
    for file in names if name == "cifar10-c" else ["cifar-100-binary/train.bin"]:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(good * 2)
    cifar.read_clean(name, tmp_path)
    (tmp_path / file).write_bytes(good + bad)
    with pytest.raises(ValueError, match=rf"{Path(file).name} has a label {label}"):
        cifar.read_clean(name, tmp_path)
