"""One scanner: it never hangs or stops, and names what it leaves out."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from trueup.atomic import longest_name, shorten_name, write_atomic
from trueup.cli.app import app
from trueup.cli.compare import open_image_folder
from trueup.data import scanning
from trueup.data.check import check_dataset, preflight_datasets
from trueup.data.datasets import open_dataset
from trueup.data.scanning import FolderScan, find_skipped, log_skipped
from trueup.deploy import folder_images as images

CIRCLE, NOWHERE = "a circular link", "a broken link"


def paint(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), 90, dtype=np.uint8)).save(path)


@pytest.fixture
def messy(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder of domain/class/image with everything in it that is neither a file nor a folder."""
    root = tmp_path / "root"
    for name in ("day/cat/0.png", "day/dog/0.png", "night/cat/0.png", "night/dog/0.png"):
        paint(root / name)
    paint(tmp_path / "elsewhere/1.png")
    os.mkfifo(root / "day/cat/pipe.png")
    (root / "day/cat/circle.png").symlink_to("circle.png")
    (root / "day/cat/gone.png").symlink_to("nothing.png")
    (root / "day/up").symlink_to("..")
    (root / "circle").symlink_to("circle")
    (root / "night/cat/linked.png").symlink_to(tmp_path / "elsewhere/1.png")
    os.chdir(root)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("day/dog/socket.png")
        os.chdir(tmp_path)
        yield (
            root,
            {
                "circle": CIRCLE,
                "day/cat/circle.png": CIRCLE,
                "day/cat/gone.png": NOWHERE,
                "day/cat/pipe.png": "a named pipe",
                "day/dog/socket.png": "a socket",
                "day/up": scanning.BACK,
            },
        )


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # and back again in the end
    scanning.log_once.cache_clear()


GOOD = ["day/cat/0.png", "day/dog/0.png", "night/cat/0.png", "night/cat/linked.png", "night/dog/0.png"]


def test_a_walk_yields_files_and_names_the_rest(messy: tuple[Path, dict[str, str]]) -> None:
    root, skipped = messy
    scan = FolderScan(root)
    assert [str(path.relative_to(root)) for path in scan.walk()] == GOOD
    assert scan.skipped == skipped == find_skipped(root)


def test_all_commands_see_the_same_files(messy: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    root, skipped = messy
    dataset = open_dataset("folder", root)
    assert sorted(f for name in dataset.targets for f in dataset.domain(name).files) == GOOD  # type: ignore[attr-defined]
    assert dict(dataset.left_out()) == skipped
    assert list(open_image_folder(root, 2).domain.files) == GOOD
    found, rest = images.find_images(root, tmp_path / "out", ("",))
    assert [image.name for image in found] == GOOD
    assert {**rest.broken, **rest.skipped} == skipped
    assert set(rest.skipped) == {"circle", "day/up"}  # the others have names of images
    (problem,) = check_dataset("folder", root).problems
    assert problem.startswith("6 entries were skipped: circle (a circular link), ")
    assert problem.endswith(" and 1 more")


def test_what_is_left_out_is_said_once(
    messy: tuple[Path, dict[str, str]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = messy
    for _ in range(2):
        preflight_datasets([open_dataset("folder", root)])
    assert caplog.text.count("folder: left out circle (a circular link)") == 1
    caplog.clear()
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object())
    log_skipped("another", {"a": "a socket"})  # processes of a sweep would each say it
    assert caplog.text == ""


def test_folders_behind_links_are_scanned_once(tmp_path: Path) -> None:
    paint(tmp_path / "far/away/1.png")
    paint(tmp_path / "in/0.png")
    (tmp_path / "in/a").symlink_to(tmp_path / "far")
    (tmp_path / "in/b").symlink_to(tmp_path / "far/away")
    (tmp_path / "far/back").symlink_to(tmp_path / "in")
    (tmp_path / "far/self").symlink_to(tmp_path / "far")
    scan = FolderScan(tmp_path / "in")
    assert [str(path.relative_to(tmp_path / "in")) for path in scan.walk()] == ["0.png", "a/away/1.png"]
    assert scan.skipped == dict.fromkeys(("a/back", "a/self", "b"), scanning.BACK)


def test_a_link_to_more_than_was_scanned_adds_the_rest(tmp_path: Path) -> None:
    for name in ("day/0.png", "night/deep/1.png", "night/2.png", "3.png"):
        paint(tmp_path / "ext/all" / name)
    (tmp_path / "ext/all/night/up").symlink_to(tmp_path / "ext/all")
    (tmp_path / "ext/all/night/out").symlink_to(tmp_path)
    (tmp_path / "lk").mkdir()
    for name, target in {"a_day": "all/day", "b_deep": "all/night/deep", "c_all": "all", "d_day": "all/day"}.items():
        (tmp_path / "lk" / name).symlink_to(tmp_path / "ext" / target)
    scan = FolderScan(tmp_path / "lk")
    found = [str(path.relative_to(tmp_path / "lk")) for path in scan.walk()]
    assert found == ["a_day/0.png", "b_deep/1.png", "c_all/3.png", "c_all/night/2.png"]
    twice = dict.fromkeys(("c_all/day", "c_all/night/deep"), "already scanned through a link")
    assert scan.skipped == twice | dict.fromkeys(("c_all/night/out", "c_all/night/up", "d_day"), scanning.BACK)


def test_a_link_from_the_folder_that_was_scanned_first_does_not_lead_above_it(tmp_path: Path) -> None:
    paint(tmp_path / "ext/all/day/0.png")
    (tmp_path / "ext/all/day/up").symlink_to(tmp_path / "ext/all")
    (tmp_path / "lk").mkdir()
    (tmp_path / "lk/a").symlink_to(tmp_path / "ext/all/day")
    scan = FolderScan(tmp_path / "lk")
    assert [path.name for path in scan.walk()] == ["0.png"]
    assert scan.skipped == {"a/up": scanning.BACK}


def test_a_domain_or_class_may_be_a_link(tmp_path: Path) -> None:
    paint(tmp_path / "far/cat/0.png")
    paint(tmp_path / "root/night/dog/0.png")
    (tmp_path / "root/day").symlink_to(tmp_path / "far")
    (tmp_path / "root/night/cat").symlink_to(tmp_path / "far/cat")
    dataset = open_dataset("folder", tmp_path / "root")
    assert dataset.targets == ("day", "night")
    assert dataset.left_out() == {}
    assert dataset.domain("night").labels.tolist() == [0, 1]


def test_folders_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("day/cat/0.png", "day/dog/0.png"):
        paint(tmp_path / name)
    scandir = os.scandir

    def refusing(path: Any) -> Any:  # root may read everything, so no mode would refuse it
        if Path(path).name == "dog":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert find_skipped(tmp_path) == {"day/dog": "cannot be read: Permission denied"}
    _, rest = images.find_images(tmp_path, tmp_path / "out", ("",))
    assert rest.broken == {"day/dog": "cannot be read: Permission denied"}
    with pytest.raises(ValueError, match="cannot be read: Permission denied"):
        list(FolderScan(tmp_path / "day/dog").walk())


def test_hidden_files_and_leftovers_of_systems_are_passed_over(tmp_path: Path) -> None:
    for name in ("0.png", "._0.png", ".git/1.png", "__MACOSX/2.png", ".DS_Store"):
        paint(tmp_path / "in" / name) if name.endswith("png") else (tmp_path / "in" / name).touch()
    assert list(open_image_folder(tmp_path / "in", 2).domain.files) == ["0.png"]
    assert find_skipped(tmp_path / "in") == {}


def test_lists_that_are_pipes_are_not_read(tmp_path: Path) -> None:
    for domain in ("art_painting", "cartoon", "photo", "sketch"):
        paint(tmp_path / domain / "dog/0.png")
    os.mkfifo(tmp_path / "photo_train.txt")
    dataset = open_dataset("pacs", tmp_path)
    assert dataset.left_out() == {"photo_train.txt": "a named pipe"}


# Long names


def test_names_are_shortened_to_what_a_file_system_takes(tmp_path: Path) -> None:
    assert shorten_name("a/b.png", ".png", 255) == "a/b.png"
    for letter in ("x", "ü", "漢"):  # of one, two and three bytes
        whole = f"a/{letter * 300}-disc.png"
        short = shorten_name(whole, "-disc.png", 255)
        assert short == shorten_name(whole, "-disc.png", 255)
        assert short.startswith(f"a/{letter * 50}")
        assert short.endswith("-disc.png")
        assert 250 <= len(os.fsencode(short.removeprefix("a/"))) <= 255
        assert short != shorten_name(f"a/{letter * 301}-disc.png", "-disc.png", 255)
    assert longest_name(tmp_path / "not/there/yet") == os.pathconf(tmp_path, "PC_NAME_MAX")


@pytest.mark.parametrize("length", [1, 230, 255])
def test_a_file_with_a_long_name_is_put_in_its_place(tmp_path: Path, length: int) -> None:
    write_atomic(tmp_path / ("x" * length), b"whole")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x" * length, b"whole")]


# As they are typed


def test_data_check_says_what_is_left_out(messy: tuple[Path, dict[str, str]]) -> None:
    root, _ = messy
    said = CliRunner().invoke(app, ["data", "check", "folder", "--root", str(root)], env={"COLUMNS": "150"})
    assert said.exit_code == 1
    assert "6 entries were skipped" in said.output
    assert "5 images, 2 classes, 2 domains" in said.output
