"""Unpacking good archives byte by byte; hashes; the target folder and leftovers."""

import gzip
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from archive_files import CONTENT, FOLDERS, KINDS, NOISE, Place, either, files, good, info, sha256, tar, zipped

from trueup.data.archives import Unpacked, folder_for, unpack_archive


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# What is good


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_comes_out_byte_by_byte(kind: str, place: Place) -> None:
    blob = good(kind)
    told = unpack_archive(place.put(blob), place.out, sha256=sha256(blob).upper())
    assert files(place.out) == CONTENT
    folders = {path.relative_to(place.out).as_posix() for path in place.out.rglob("*") if path.is_dir()}
    assert folders == {*FOLDERS, "__MACOSX"}
    assert told == Unpacked(len(CONTENT), sum(map(len, CONTENT.values())), sha256(blob))
    assert sorted(path.name for path in place.home.iterdir()) == ["data", "data.bin", "mine.txt"]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_dialect_of_tar(form: int, place: Place) -> None:
    long = "/".join(["a folder with a long name"] * 5) + "/" + "x" * 90
    members = info(long, b"1"), info("./b/./c", b"2"), info("./", type=tarfile.DIRTYPE)
    unpack_archive(place.put(tar(*members, form=form)), place.out)
    assert files(place.out) == {long: b"1", "b/c": b"2"}


@pytest.mark.skipif(shutil.which("tar") is None, reason="there is no tar program")
def test_what_the_tar_program_makes(place: Place) -> None:
    """A second opinion on what an archive is: ./ in front of all names, and two blocks at the end."""
    for name, content in CONTENT.items():
        (place.root / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (place.root / "in" / name).write_bytes(content)
    subprocess.run(["tar", "-czf", place.archive, "-C", place.root / "in", "."], check=True)
    unpack_archive(place.archive, place.out)
    assert files(place.out) == CONTENT


def test_compressed_parts_one_after_another_are_one(place: Place) -> None:
    blob = tar(info("a", NOISE))
    unpack_archive(place.put(gzip.compress(blob[:7000]) + gzip.compress(blob[7000:])), place.out)
    assert files(place.out) == {"a": NOISE}


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_folder_may_be_named_twice_or_not_at_all(place: Place) -> None:
    unpack_archive(place.put(zipped(("a/", b""), ("a/b/x", b"1"), ("a/", b""), ("a/b/", b""))), place.out)
    assert files(place.out) == {"a/b/x": b"1"}


def test_archives_in_archives_are_files(place: Place) -> None:
    inner = zipped(("deep.zip", zipped(("x", bytes(9_000_000)))))
    assert unpack_archive(place.put(zipped(("inner.zip", inner))), place.out).bytes == len(inner)
    assert files(place.out) == {"inner.zip": inner}


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_the_content_says_the_kind_not_the_name(kind: str, place: Place) -> None:
    wrong = place.home / ("data.tar.gz" if kind == "zip" else "data.zip")
    wrong.write_bytes(good(kind))
    unpack_archive(wrong, place.out)
    assert files(place.out) == CONTENT


@pytest.mark.parametrize("blob", [tar(info("a", b"1", mode=0o6777)), b""], ids=["tar", "zip"])
def test_no_permissions_are_kept(blob: bytes, place: Place) -> None:
    member = zipfile.ZipInfo("a")
    member.external_attr = (stat.S_IFREG | 0o6777) << 16
    folder = zipfile.ZipInfo("b/c/")
    folder.external_attr = (stat.S_IFDIR | 0o7777) << 16
    before = os.umask(0)
    try:
        unpack_archive(place.put(blob or zipped((member, b"1"), (folder, b""), ("d/e/f", b""))), place.out)
    finally:
        os.umask(before)
    for path in (place.out, *place.out.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path


def test_an_empty_folder_is_filled(place: Place) -> None:
    place.out.mkdir()
    unpack_archive(place.put(good("tar.xz")), place.out)
    assert files(place.out) == CONTENT


def test_progress_counts_what_is_read_and_what_is_written(place: Place) -> None:
    heard: list[tuple[int, int]] = []
    blob = good("tar.gz")
    unpack_archive(place.put(blob), place.out, progress=lambda *numbers: heard.append(numbers))
    total = sum(map(len, CONTENT.values()))
    assert heard[0] == (len(blob), len(blob))
    assert heard[-1] == (total, total)
    written = [done for done, of in heard if of == total]
    assert written == sorted(written)
    assert len(written) >= 5
    assert all(0 < done <= of for done, of in heard)


# The hash


@pytest.mark.parametrize("kind", KINDS)
def test_another_hash_is_refused_first(kind: str, place: Place) -> None:
    other = sha256(b"other")
    place.refuses(good(kind), f"its SHA-256 is {sha256(good(kind))}, not {other}", sha256=other)
    place.refuses(b"no archive at all", "its SHA-256 is", sha256=other)


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_byte_is_noticed(kind: str, place: Place) -> None:
    blob = good(kind)
    for at in (0, 300, len(blob) // 2, len(blob) - 1):
        flipped = blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :]
        place.refuses(flipped, "its SHA-256 is", sha256=sha256(blob))


@pytest.mark.parametrize("wrong", ["", "abc", "g" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n", "sha256:" + "0" * 64])
def test_what_is_no_hash_is_said(wrong: str, place: Place) -> None:
    place.put(good("zip"))
    with pytest.raises(ValueError, match="is not a SHA-256: it must have 64 hexadecimal digits"):
        unpack_archive(place.archive, place.out, sha256=wrong)
    assert not place.out.exists()


def test_a_file_put_in_its_place_is_not_what_is_unpacked(place: Place) -> None:
    """Opened once: a swap after the hash has no effect."""
    evil = place.home / "evil"
    evil.write_bytes(zipped(("evil", b"evil")))

    def swap(done: int, of: int) -> None:
        if evil.exists():
            evil.replace(place.archive)

    blob = good("zip")
    place.put(blob)
    with pytest.raises(ValueError, match="changed while it was read"):  # its number of names is another
        unpack_archive(place.archive, place.out, sha256=sha256(blob), progress=swap)
    assert not place.out.exists()


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("moment", [1, 3, -1])
def test_a_change_under_way_is_noticed(kind: str, moment: int, place: Place) -> None:
    """Content, names or the end: whatever is written into the file after it was hashed."""
    blob, calls = good(kind), []
    unpack_archive(place.put(blob), place.out, progress=lambda *_: calls.append(1))
    shutil.rmtree(place.out)
    last, calls = len(calls), []

    def change(done: int, of: int) -> None:
        calls.append(1)
        if len(calls) == moment % (last + 1):
            with place.archive.open("r+b") as file:
                file.seek(blob.index(NOISE[:50]) + 1 if kind == "tar" else 200)
                file.write(b"!")

    with pytest.raises(ValueError, match=r"changed while|damaged"):
        unpack_archive(place.archive, place.out, sha256=sha256(blob), progress=change)
    assert sorted(path.name for path in place.home.iterdir()) == ["data.bin", "mine.txt"]


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_nothing_is_written_of_what_was_not_checked(kind: str, place: Place) -> None:
    """The members have other names when they come to be written."""
    first, second = (either(kind, (name, b"12345"), ("other", NOISE)) for name in ("good", "evil"))
    heard: list[int] = []

    def swap(done: int, of: int) -> None:
        heard.append(of)
        if len(heard) == 3:  # the hash, and two members
            place.archive.write_bytes(second)

    with pytest.raises(ValueError, match="changed while it was read"):
        unpack_archive(place.put(first), place.out, sha256=sha256(first), progress=swap)
    assert heard == [len(first)] * 3
    assert sorted(path.name for path in place.home.iterdir()) == ["data.bin", "mine.txt"]


# What is there already, and what is left


@pytest.mark.parametrize("what", ["file", "full", "link", "dangling", "above", "nowhere"])
def test_nothing_is_overwritten(what: str, place: Place) -> None:
    place.put(good("zip"))
    out = place.out
    if what == "file":
        out.write_text("mine")
    elif what == "full":
        out.mkdir()
        (out / ".hidden").touch()
    elif what == "link":
        (place.root / "empty").mkdir()
        out.symlink_to(place.root / "empty")
    elif what == "dangling":
        out.symlink_to(place.root / "none")
    else:
        out = place.home / "none" / ".." if what == "above" else place.home / "none" / "data"
    before = place.listing()
    with pytest.raises(ValueError, match=r"is not an empty folder: choose another|cannot create"):
        unpack_archive(place.archive, out)
    assert place.listing() == before


def test_what_is_no_file_is_said(place: Place) -> None:
    for path in (place.home / "none", place.home):
        with pytest.raises(ValueError, match="is not a file"):
            unpack_archive(path, place.out)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("stop"), OSError("disk full")])
@pytest.mark.parametrize("kind", ["zip", "tar.xz"])
def test_a_stop_in_the_middle_leaves_nothing(kind: str, error: BaseException | type, place: Place) -> None:
    total = sum(map(len, CONTENT.values()))
    for step in ("hash", "check", "write"):
        place.put(good(kind))
        before, calls = place.listing(), []

        def stop(done: int, of: int, step: str = step, calls: list[int] = calls) -> None:
            calls.append(of)
            if step == "write" and of == total and done > 5000:
                assert len(list(place.home.glob(f".data.{os.getpid()}.partial/PACS/**/*.png"))) > 0
                raise error
            if step == "hash" or (step == "check" and len(calls) == 4):
                raise error

        with pytest.raises(error if isinstance(error, type) else type(error)):
            unpack_archive(place.archive, place.out, progress=stop)
        assert place.listing() == before


def test_a_folder_that_appears_meanwhile_is_kept(place: Place) -> None:
    place.put(good("zip"))

    def fill(done: int, of: int) -> None:
        place.out.mkdir(exist_ok=True)
        (place.out / "other").touch()

    with pytest.raises(OSError, match="data"):
        unpack_archive(place.archive, place.out, progress=fill)
    assert [path.name for path in place.out.iterdir()] == ["other"]
    assert not list(place.home.glob(".*"))


def dead() -> int:
    """The number of a process that is no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(place: Place) -> None:
    gone, alive = dead(), os.getppid()
    for name in (f".data.{gone}.partial", f".data.{os.getpid()}.partial"):
        (place.home / name / "deep").mkdir(parents=True)
        (place.home / name / "deep" / "half.png").touch()
    kept = [f".data.{alive}.partial", ".data.1.partial", f".data2.{gone}.partial", f".data.{gone}.partial.x"]
    kept += [".data.0.partial", ".data.-1.partial", ".data.x.partial", f".data.0{gone}.partial"]
    for name in kept:
        (place.home / name).mkdir()
        (place.home / name / "kept").touch()
    (place.home / f".da[t]a.{gone}.partial").mkdir()
    unpack_archive(place.put(good("zip")), place.out)
    assert {path.name for path in place.home.glob(".*")} == {*kept, f".da[t]a.{gone}.partial"}
    assert all((place.home / name / "kept").exists() for name in kept)


def test_a_process_of_somebody_else_is_alive(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, signal: int) -> None:
        assert signal == 0
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    (place.home / ".data.77.partial").mkdir()
    unpack_archive(place.put(good("zip")), place.out)
    assert (place.home / ".data.77.partial").is_dir()


def test_leftovers_of_other_names_stay(place: Place) -> None:
    (place.home / f".data.{dead()}.partial").mkdir()
    unpack_archive(place.put(good("zip")), place.home / "d.ta")
    assert len(list(place.home.glob(".data.*.partial"))) == 1


def test_a_leftover_that_is_a_link_is_not_followed(place: Place) -> None:
    link = place.home / f".data.{dead()}.partial"
    link.symlink_to(place.root)
    unpack_archive(place.put(good("zip")), place.out)
    assert link.is_symlink()
    assert (place.root / "other.txt").exists()


def test_names_of_folders_by_default() -> None:
    names = ["pacs.zip", "x/PACS.tar.GZ", "v1.2.tgz", "a.b.tar.xz", "a.tar", "a.tar.bz2", "a.tbz", "a.zip.zip"]
    assert [str(folder_for(name)) for name in names] == ["pacs", "PACS", "v1.2", "a.b", "a", "a", "a", "a.zip"]
    for name in ("data", ".zip", "data.gz"):
        with pytest.raises(ValueError, match="give --out"):
            folder_for(name)
