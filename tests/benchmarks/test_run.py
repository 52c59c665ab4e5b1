"""Guards the runner of the benchmarks: one process for each shape, this package and the C++ package side by side, and
failures that are reported. tests/torch/test_benchmarks.py runs the cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import run
from cases import CASES, find
from results import Row
from savers import Peer, Unavailable

MACHINE = {"device": "A GPU", "processors": 2, "driver": "1.2", "torch": "3.4", "date": "2026-01-02", "simulated": False}

Answer = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[dict[str, Any]]]:
    """Replaces the processes by a function from their job to their result. Returns the list of the jobs."""
    monkeypatch.delenv("TMS_CUDA_DRIVER", raising=False)

    def replace(function: Answer) -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = []

        def start(job: dict[str, Any]) -> dict[str, Any]:
            if "host_bytes" in job:
                return {"rows": []}
            jobs.append(job)
            return function(job)

        monkeypatch.setattr(run, "_start", start)
        return jobs

    return replace


def measured(job: dict[str, Any]) -> dict[str, Any]:
    side = {"ours": [1.0], "limit": [0.5]} if job["peer"] is None else {"peer": [2.0]}
    return {"rows": [asdict(Row(job["case"], job["described"], "pause", 1, **side))], "machine": MACHINE}


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    """A folder with a distribution of the C++ package's name."""
    folder = tmp_path / "peer"
    (folder / "torch_memory_saver-9.9.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: torch-memory-saver\nVersion: 9.9\n"
    (folder / "torch_memory_saver-9.9.dist-info" / "METADATA").write_text(metadata)
    return folder


def test_processes_of_both_packages(answer: Any, peer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = answer(measured)
    path = tmp_path / "out.json"
    arguments = ["--cases", "first, pooled", "--repetitions", "2", "--peer", str(peer), "--json", str(path)]
    assert run.main(arguments) == 0
    sides = [(job["case"], job["shape"], job["peer"]) for job in jobs]
    of_first = [("first", shape, side) for shape in (0, 1) for side in (None, None, str(peer), str(peer))]
    assert sides == [*of_first, ("pooled", 0, None), ("pooled", 1, None)], "the peer has no pool"
    data = json.loads(path.read_text())
    assert data["peer"] == "9.9"
    first = data["rows"][0]
    assert (first["case"], first["ours"], first["peer"], first["limit"]) == ("first", [1.0] * 2, [2.0] * 2, [0.5] * 2)
    assert (first["median"], first["ratio"]) == (1.0, 0.5)
    assert "C++ 9.9" in capsys.readouterr().out


@pytest.mark.parametrize(("side", "status"), [("ours", 1), ("peer", 0)])
def test_a_failure_is_reported_and_the_others_run(
    answer: Any, peer: Path, capsys: pytest.CaptureFixture[str], side: str, status: int
) -> None:
    def fail(job: dict[str, Any]) -> dict[str, Any]:
        if job["case"] == "mmap" and (job["peer"] is None) == (side == "ours"):
            return {"failed": "the process ended with status 3", "traceback": "Traceback of it"}
        return measured(job)

    answer(fail)
    assert run.main(["--cases", "mmap,disk", "--peer", str(peer)]) == status, "only a failure of this package is one"
    shown = capsys.readouterr()
    assert "the process ended with status 3" in shown.err.partition("left out: mmap, 32 x 512 MiB")[2]
    assert "Traceback of it" in shown.err
    assert "disk, 8 x 512 MiB" in shown.out


def test_interrupted(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(job: dict[str, Any]) -> dict[str, Any]:
        if job["case"] == "import":
            raise KeyboardInterrupt
        return measured(job)

    jobs = answer(interrupt)
    assert run.main(["--cases", "region,import,mmap"]) == 130
    assert [job["case"] for job in jobs] == ["region", "import"]
    assert "region, once" in capsys.readouterr().out


def test_a_process_that_writes_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, body, reason in (
        ("dies.py", "import os; os._exit(3)", "the process ended with status 3 and wrote no result"),
        ("hangs.py", "import time; time.sleep(600)", "the process did not end within 0.1 seconds and was killed"),
    ):
        (tmp_path / name).write_text(body)
        monkeypatch.setattr(run, "__file__", str(tmp_path / name))
        assert run._start({"peer": None}) == {"failed": reason}
        monkeypatch.setattr(run, "_TIMEOUT_S", 0.1)


def test_the_worker_writes_its_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unavailable(job: object) -> dict[str, Any]:
        raise Unavailable("a reason")

    def broken(job: object) -> dict[str, Any]:
        raise ValueError("broken")

    result = tmp_path / "result.json"
    for work, expected in ((unavailable, {"unavailable": "a reason"}), (broken, {"failed": "ValueError: broken"})):
        monkeypatch.setattr(run, "measure", work)
        assert run.main(["--worker", json.dumps({"peer": None, "result": str(result)})]) == 0
        written = json.loads(result.read_text())
        assert expected.items() <= written.items()


def test_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, words in {
        ("--cases", "dropped,nonsense"): "there is no case 'nonsense': choose from dropped,",
        ("--cases", ","): "no case is given",
        ("--scale", "2"): "'2' is not a number from 0.00195 to 1",
        ("--scale", "nan"): "is not a number from",
        ("--repetitions", "0"): "'0' is not a whole number of at least 1",
        ("--repetitions", "x"): "is not a whole number of at least 1",
    }.items():
        with pytest.raises(SystemExit):
            run.main(arguments)
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"there is no torch_memory_saver in .*: install one there"):
        run.main(["--peer", str(tmp_path)])


def test_every_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.shapes and case.repetitions > 0 for case in CASES)
    assert find("nonsense") is None


def test_a_peer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="python found"):
        Peer(str(tmp_path))


def test_a_peer_does_what_it_can(tmp_path: Path) -> None:
    """A package of that name with as much of its API as the C++ package has had in every release."""
    (tmp_path / "torch_memory_saver").mkdir()
    (tmp_path / "torch_memory_saver" / "__init__.py").write_text("""
from contextlib import contextmanager
calls = []
class Saver:
    hook_mode = None
    @contextmanager
    def region(self, tag="default", enable_cpu_backup=False):
        calls.append((self.hook_mode, tag, enable_cpu_backup))
        yield
    def pause(self, tag=None):
        calls.append("pause")
torch_memory_saver = Saver()
""")
    program = """
import sys, torch_memory_saver
from savers import Peer, Unavailable
peer = Peer(sys.argv[1])
with peer.region("a", "pinned", "release"):
    peer.pause("a", live_only=False)
print(torch_memory_saver.calls)
for settings in (("a", "disk", "release"), ("a", "mmap", "release"), ("a", "pinned", "pool"), ("a", "pinned", "retain")):
    try:
        peer.region(*settings)
    except Unavailable as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(run.__file__).parent)])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "[('torch', 'a', True), 'pause']",
        "its region() has no parameter enable_disk_backup",
        "its region() has no parameter cpu_backup_backend",
        "it has no pool of host memory",
        "it does not retain backups",
    ]
