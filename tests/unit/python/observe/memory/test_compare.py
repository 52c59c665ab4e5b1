"""Guards the command `compare`: its output, its exit statuses, and that it needs no PyTorch."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest
from snapshots import MIB, block, recorded_files, segment, snapshot, write

from torch_memory_saver._cli.main import main


@pytest.fixture
def leaking() -> list[str]:
    """Recorded moments of a program that leaks."""
    return [str(path) for path in recorded_files()[:3]]


def test_the_table(leaking: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["compare", *leaking]) == 0
    text = capsys.readouterr().out
    assert "leak: trainer, pid " in text and text.endswith("\n")
    assert max(map(len, text.splitlines())) <= 80


def test_a_page_is_written(leaking: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "out.html"
    assert main(["compare", *leaking, "-o", str(page)]) == 0
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert "Findings" in capsys.readouterr().out


def test_json(leaking: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *leaking, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [leak["blocks"] for leak in found["leaks"]] == [[4, 8, 12]]
    assert found["leaks"][0]["stack"]["frames"][0] == {
        "filename": "/program/record_snapshots.py",
        "line": 46,
        "name": "numbers",
    }
    assert found["processes"][0]["process"]["role"] == "trainer"


def test_a_leak_can_fail_a_job(leaking: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *leaking, "--fail-on-leak"]) == 1
    assert main(["compare", *[leaking[0]] * 3, "--fail-on-leak"]) == 0
    capsys.readouterr()
    assert main(["compare", *leaking[:2], "--fail-on-leak"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "needs snapshots of three moments or more" in shown.err and shown.err.endswith("these are of 2.\n")


def test_a_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path / "no.pickle")]) == 2
    assert capsys.readouterr().err == (
        f"torch-memory-saver compare: error: {tmp_path}/no.pickle cannot be read (No such file or directory). "
        "Check the path; `run --record snapshots` makes a snapshot before each pause of the program.\n"
    )
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as file:  # as torch.save() makes it
        file.writestr("w/data.pkl", b"")
    assert main(["compare", str(tmp_path / "w.pt")]) == 2
    assert f"{tmp_path}/w.pt is no snapshot, because it is no pickle of plain values: give " in capsys.readouterr().err


def test_a_page_that_cannot_be_written(leaking: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *leaking, "-o", str(tmp_path)]) == 2
    assert (
        f"compare: error: {tmp_path}: Is a directory: the page was not written; choose another folder\n"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("top", ["0", "-1", "x"])
def test_rows_are_at_least_one(leaking: list[str], top: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["compare", *leaking, "--top", top])
    assert caught.value.code == 2


def test_no_pytorch_is_needed(leaking: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails
    assert main(["compare", *leaking, "-o", str(tmp_path / "out.html"), "--json"]) == 0


def test_names_that_the_terminal_cannot_show(tmp_path: Path, command: object) -> None:
    for step in range(3):
        row = segment(1 << 40, *[block(MIB, ("/srv/größe.py", 1, "f"))] * (step + 1))
        write(tmp_path / f"{step}.pickle", snapshot(row, step=step))
    files = sorted(map(str, tmp_path.iterdir()))
    done = command("compare", *files, PYTHONIOENCODING="ascii")  # type: ignore[operator]
    assert "gr\\xf6\\xdfe.py" in done.stdout
