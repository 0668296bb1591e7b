"""Records: one line each, whole or not at all, one writer at a time."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toy_jobs import reproducible_part

from trueup.bench.records import FILE, finished_records, open_writer, read_records


def record(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "settings": {"seed": 0}, "results": {"accuracy": 0.5}} | more


def write(path: Path, *records: dict[str, Any]) -> None:
    with open_writer(path) as add:
        for each in records:
            add(each)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    there = [record("a", note="λ ≥ 1, \n two lines"), record("b", search=[{"lr": 1e-5, "per_class": None}])]
    write(tmp_path / FILE, *there)
    assert read_records(tmp_path / FILE) == there
    assert len((tmp_path / FILE).read_bytes().splitlines()) == 2


def test_writing_makes_its_folder_and_adds_to_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "down" / FILE
    write(file, record("a"))
    write(file, record("b"))
    assert [r["id"] for r in read_records(file)] == ["a", "b"]


def test_line_cut_short_at_any_byte_is_left_out_and_the_next_is_read(tmp_path: Path) -> None:
    file = tmp_path / FILE
    write(file, record("a"), record("b"))
    whole = file.read_bytes()
    first, second = whole.index(b"\n") + 1, len(whole)
    for end in range(first, second + 1):
        file.write_bytes(whole[:end])
        complete = end >= second - 1  # only the line's end is missing
        assert [r["id"] for r in read_records(file)] == (["a", "b"] if complete else ["a"])
        write(file, record("c"))
        assert [r["id"] for r in read_records(file)] == (["a", "b", "c"] if complete else ["a", "c"])


def test_noise_between_lines_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / FILE
    write(file, record("a"))
    with file.open("ab") as raw:
        raw.write(b"\0\0\0\n\xff\xfe\n\n[1]\n3\n{}\n" + b'{"id": "x"}\n')
    write(file, record("b"))
    assert [r["id"] for r in read_records(file)] == ["a", "b"]


def test_last_of_equal_ids_wins(tmp_path: Path) -> None:
    write(tmp_path / FILE, record("a", n=1), record("b"), record("a", n=2))
    assert {r["id"]: r.get("n") for r in read_records(tmp_path / FILE)} == {"a": 2, "b": None}


def test_failures_are_read_but_not_finished(tmp_path: Path) -> None:
    failed = {"id": "b", "settings": {}, "error": "ValueError: no", "at": []}
    write(tmp_path / FILE, record("a"), failed)
    assert [r["id"] for r in read_records(tmp_path / FILE)] == ["a", "b"]
    assert finished_records(tmp_path / FILE) == {"a": record("a")}


def test_run_that_failed_first_and_went_well_later_is_finished(tmp_path: Path) -> None:
    write(tmp_path / FILE, {"id": "a", "settings": {}, "error": "no"}, record("a"))
    assert list(finished_records(tmp_path / FILE)) == ["a"]


def test_nothing_is_finished_where_there_is_no_file(tmp_path: Path) -> None:
    assert finished_records(tmp_path / "nowhere" / FILE) == {}


def test_folder_is_read_with_all_its_files(tmp_path: Path) -> None:
    write(tmp_path / "one" / FILE, record("a", n=1))
    write(tmp_path / "two" / "deeper" / FILE, record("b"), record("a", n=2))
    (tmp_path / "two" / "other.jsonl").write_text(json.dumps(record("c")) + "\n")
    assert {r["id"]: r.get("n") for r in read_records(tmp_path)} == {"a": 2, "b": None}


def test_finished_run_in_one_file_is_not_hidden_by_a_failure_in_another(tmp_path: Path) -> None:
    write(tmp_path / "one" / FILE, record("a"))
    write(tmp_path / "two" / FILE, {"id": "a", "settings": {}, "error": "out of memory"})
    assert read_records(tmp_path) == [record("a")]


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere does not exist; give the folder of a sweep"):
        read_records(tmp_path / "nowhere")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused_and_nothing_is_written(tmp_path: Path, value: float) -> None:
    with open_writer(tmp_path / FILE) as add:
        add(record("a"))
        with pytest.raises(ValueError, match="JSON compliant"):
            add(record("b", cost={"seconds": value}))
        add(record("c"))
    assert [r["id"] for r in read_records(tmp_path / FILE)] == ["a", "c"]


def test_record_is_on_disk_as_soon_as_it_is_added(tmp_path: Path) -> None:
    with open_writer(tmp_path / FILE) as add:
        add(record("a"))
        assert [r["id"] for r in read_records(tmp_path / FILE)] == ["a"]


def test_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    file = tmp_path / FILE
    with open_writer(file), pytest.raises(ValueError, match="another sweep is writing to"), open_writer(file):
        pass
    write(file, record("a"))


def test_lock_is_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), open_writer(tmp_path / FILE):
        raise KeyError
    write(tmp_path / FILE, record("a"))


def test_writer_in_another_process_is_refused_until_that_dies(tmp_path: Path) -> None:
    file = tmp_path / FILE
    # The same lock as ours, without the seconds that importing the package takes.
    code = "import filelock, sys; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); "
    code += "print('here', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / f".{FILE}.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "here\n"
        with pytest.raises(ValueError, match="another sweep is writing to"), open_writer(file):
            pass
        other.kill()  # and its lock file stays
    write(file, record("a"))
    assert [r["id"] for r in read_records(file)] == ["a"]


def test_steady_part_leaves_out_time_and_memory_alone() -> None:
    whole = record("a", cost={"seconds": 1.0}, finished="2023-01-01T00:00:00Z", environment={"threads": 1})
    assert reproducible_part(whole) == record("a", environment={"threads": 1})
    assert "cost" in whole
