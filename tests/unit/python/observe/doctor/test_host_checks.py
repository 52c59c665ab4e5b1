"""Guards the checks of the host: what they find in planted files of /proc and /sys."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from findings import assert_complete

from torch_memory_saver.observe._doctor import host_checks
from torch_memory_saver.observe._doctor.check import Device, DriverFacts, Status

GIB = 1 << 30
CGROUP_2 = "30 1 0:26 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw\n"
CGROUP_1 = "31 1 0:27 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The root of planted files: 64 GiB of memory, no cgroup, no GPU."""
    root = tmp_path / "root"
    monkeypatch.setattr(host_checks, "ROOT", root)
    monkeypatch.setattr(host_checks, "network_cards", list)
    monkeypatch.setattr(host_checks, "driver_facts", lambda: DriverFacts())
    plant(root, {"proc/meminfo": meminfo(64), "proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/sda rw\n"})
    return root


def meminfo(available: int, huge: int = 0) -> str:
    return f"MemTotal: 99999 kB\nMemAvailable: {available << 20} kB\nHugePages_Total: {huge}\nHugepagesize: 2048 kB\n"


def plant(root: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def test_host_memory_without_a_limit(machine: Path) -> None:
    finding = host_checks.host_memory()
    assert_complete(finding, Status.OK)
    assert finding.found == "64 GiB available, no cgroup limits it"


def test_the_tightest_cgroup_is_named(machine: Path) -> None:
    plant(
        machine,
        {
            "proc/self/mountinfo": CGROUP_2,
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/a/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory.max": f"{9 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        },
    )
    found = "64 GiB available; the cgroup /sys/fs/cgroup/a uses 3 GiB of its limit of 8 GiB"
    assert host_checks.host_memory().found == found


def test_page_cache_that_can_be_dropped_is_not_used(machine: Path) -> None:
    """A process that has read its model's files has filled its cgroup with page cache."""
    files = {"proc/self/mountinfo": CGROUP_2, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{16 * GIB}\n"}
    files["sys/fs/cgroup/memory.current"] = f"{15 * GIB}\n"
    files["sys/fs/cgroup/memory.stat"] = f"anon 1\nfile 2\ninactive_anon 3\ninactive_file {12 * GIB}\n"
    plant(machine, files)
    assert "uses 3 GiB of its limit of 16 GiB" in host_checks.host_memory().found
    plant(machine, {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.high": f"{14 * GIB}\n"})
    assert "uses 3 GiB of its limit of 14 GiB" in host_checks.host_memory().found, "above it the kernel throttles"


@pytest.mark.parametrize("path", ["/docker/abc", "/elsewhere"])
def test_a_cgroup_of_version_1_in_a_container(machine: Path, path: str) -> None:
    files = {
        "proc/self/mountinfo": CGROUP_1,
        "proc/self/cgroup": f"5:cpu:/\n4:memory:{path}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{16 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{15 * GIB}\n",
    }
    plant(machine, files)
    assert "/sys/fs/cgroup/memory uses 15 GiB of its limit of 16 GiB" in host_checks.host_memory().found
    plant(machine, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert host_checks.host_memory().found.endswith("no cgroup limits it")


@pytest.mark.parametrize(("used", "status"), [(7, Status.OK), (9, Status.WARN)])
def test_less_host_memory_than_one_gpu_has(machine: Path, monkeypatch: pytest.MonkeyPatch, used: int, status: str) -> None:
    facts = DriverFacts(devices=[Device(0, total_bytes=8 * GIB), Device(1, total_bytes=4 * GIB)])
    monkeypatch.setattr(host_checks, "driver_facts", lambda: facts)
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": CGROUP_2, "sys/fs/cgroup/memory.max": f"{16 * GIB}"}
    plant(machine, files | {"sys/fs/cgroup/memory.current": f"{used * GIB}"})
    finding = host_checks.host_memory()
    assert_complete(finding, status)
    assert ("less than the memory of one GPU, 8 GiB" in finding.found) == (status == Status.WARN)


@pytest.mark.parametrize(
    ("setting", "status"),
    [("always [madvise] never", Status.OK), ("[always] madvise never", Status.OK), ("always madvise [never]", Status.WARN)],
)
def test_transparent_huge_pages(machine: Path, setting: str, status: str) -> None:
    plant(machine, {"sys/kernel/mm/transparent_hugepage/enabled": setting + "\n"})
    finding = host_checks.huge_pages()
    assert_complete(finding, status)
    assert finding.details == ()


def test_a_kernel_without_huge_pages(machine: Path) -> None:
    assert_complete(host_checks.huge_pages(), Status.SKIP)


def test_reserved_huge_pages_are_shown(machine: Path) -> None:
    plant(machine, {"proc/meminfo": meminfo(64, huge=1024), "sys/kernel/mm/transparent_hugepage/enabled": "[always]"})
    (line,) = host_checks.huge_pages().details
    assert line.startswith("1024 huge pages (2 GiB) are reserved")


@pytest.mark.parametrize(
    ("limit", "capabilities", "cards", "status"),
    [
        (resource.RLIM_INFINITY, 0, ["mlx5_0"], Status.OK),
        (8 << 20, 0, ["mlx5_0"], Status.WARN),
        (8 << 20, 0, [], Status.OK),
        (8 << 20, 1 << 14, ["mlx5_0"], Status.OK),
        (8 << 20, ~(1 << 14) & 0xFFFFFFFF, ["mlx5_0"], Status.WARN),
    ],
)
def test_locked_memory(
    machine: Path, monkeypatch: pytest.MonkeyPatch, limit: int, capabilities: int, cards: list[str], status: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(host_checks, "network_cards", lambda: cards)
    plant(machine, {"proc/self/status": f"Name:\tpython\nCapEff:\t{capabilities:016x}\n"})
    assert_complete(host_checks.locked_memory(), status)


@pytest.fixture
def folder(machine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where disk backups go."""
    monkeypatch.setenv("TMS_DISK_BACKUP_DIR", str(tmp_path / "disk"))
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=2 << 20, f_frsize=4096))
    return tmp_path / "disk"


def test_a_folder_on_a_disk(folder: Path) -> None:
    finding = host_checks.disk_directory()
    assert_complete(finding, Status.OK)
    assert finding.found == f"{folder} (TMS_DISK_BACKUP_DIR) on ext4, 8 GiB free"
    assert list(folder.iterdir()) == []


def test_which_folder_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_DISK_BACKUP_DIR", "relative")  # the core ignores it
    assert host_checks.disk_directory().found.startswith("/tmp on ")
    monkeypatch.delenv("TMS_DISK_BACKUP_DIR")
    monkeypatch.setenv("TMPDIR", str(folder))
    assert host_checks.disk_directory().found.startswith(f"{folder} (TMPDIR) on ")
    monkeypatch.setenv("TMPDIR", "")
    assert host_checks.disk_directory().found.startswith("/tmp on ")


@pytest.mark.parametrize(("kind", "status"), [("tmpfs", Status.WARN), ("ramfs", Status.WARN), ("xfs", Status.OK)])
def test_a_folder_that_is_memory(machine: Path, folder: Path, kind: str, status: str) -> None:
    point = str(folder.parent).replace(" ", "\\040")
    lines = f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:1 / {point} rw - {kind} none rw\n"
    lines += f"3 1 0:2 / {point}/disk2 rw - tmpfs none rw\n"  # beside the folder
    plant(machine, {"proc/self/mountinfo": lines})
    finding = host_checks.disk_directory()
    assert_complete(finding, status)
    assert f" on {kind}, " in finding.found
    assert ("it is memory" in finding.found) == (status == Status.WARN)


def test_a_disk_that_is_nearly_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=100, f_frsize=4096))
    assert_complete(host_checks.disk_directory(), Status.WARN)


def test_a_folder_that_does_not_exist(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_DISK_BACKUP_DIR", str(folder / "new"))
    assert_complete(host_checks.disk_directory(), Status.OK)  # the core creates it
    assert list(folder.iterdir()) == []
    monkeypatch.setenv("TMS_DISK_BACKUP_DIR", str(folder / "new" / "below"))
    finding = host_checks.disk_directory()
    assert_complete(finding, Status.FAIL)
    assert f"there is no {folder}/new" in finding.found


def test_a_file_is_no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("TMS_DISK_BACKUP_DIR", str(folder / "file"))
    finding = host_checks.disk_directory()
    assert_complete(finding, Status.FAIL)
    assert finding.found.endswith("is no folder")


def test_a_folder_that_cannot_be_written_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_DISK_BACKUP_DIR", "/proc/self")
    finding = host_checks.disk_directory()
    assert_complete(finding, Status.FAIL)
    assert "/proc/self (TMS_DISK_BACKUP_DIR) cannot be written to: " in finding.found


@pytest.fixture
def shared(machine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the shared store, on a tmpfs of 2 GiB. It does not exist yet."""
    point = tmp_path / "memory"
    point.mkdir(mode=0o700)
    monkeypatch.setenv("TMS_SHARED_DIR", str(point / "store"))
    mount_shared(machine, "tmpfs", "rw,size=2097152k")
    fill_shared(monkeypatch, 2 * GIB)
    return point / "store"


def mount_shared(root: Path, kind: str, options: str) -> None:
    text = f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:1 / {root.parent}/memory rw - {kind} none {options}\n"
    plant(root, {"proc/self/mountinfo": text})


def fill_shared(monkeypatch: pytest.MonkeyPatch, size: int, inodes: int = 1000) -> None:
    """Half of the bytes are free, and all inodes but one."""
    values = SimpleNamespace(
        f_blocks=size // 4096, f_bavail=size // 8192, f_frsize=4096, f_files=inodes, f_favail=max(inodes - 1, 0)
    )
    monkeypatch.setattr(os, "statvfs", lambda _: values)


def test_the_shared_store(shared: Path) -> None:
    for _ in range(2):
        finding = host_checks.shared_store()
        assert_complete(finding, Status.OK)
        assert finding.found == f"{shared} (TMS_SHARED_DIR) on tmpfs, 1 GiB of 2 GiB and 999 of 1000 inodes free"
        assert finding.details == (f"pages of {page_size()} (this kernel has no huge pages)",)
        assert not list(shared.parent.glob("store/*")), "looking makes nothing"
        shared.mkdir(mode=0o700, exist_ok=True)


def page_size() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') >> 10} KiB"


def test_the_default_shared_store(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMS_SHARED_DIR", raising=False)
    assert host_checks.shared_store().found.startswith(f"/dev/shm/torch_memory_saver-store-{os.geteuid()} on ")


def test_a_shared_store_without_limits(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_shared(monkeypatch, 0, 0)
    finding = host_checks.shared_store()
    assert_complete(finding, Status.OK)
    assert finding.found.endswith(" on tmpfs, any number of bytes and any number of inodes free")


def test_a_shared_store_with_few_inodes(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_shared(monkeypatch, 2 * GIB, 7)
    finding = host_checks.shared_store()
    assert_complete(finding, Status.WARN)
    assert finding.found.endswith(" 6 of 7 inodes free; shared backups need more inodes")
    assert "nr_inodes" in finding.advice


def test_a_small_shared_store(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_shared(monkeypatch, 64 << 20)
    finding = host_checks.shared_store()
    assert_complete(finding, Status.WARN)
    assert "32 MiB of 64 MiB" in finding.found and "--shm-size" in finding.advice


def test_a_shared_store_on_a_disk(machine: Path, shared: Path) -> None:
    mount_shared(machine, "ext4", "rw")
    finding = host_checks.shared_store()
    assert_complete(finding, Status.WARN)
    assert " on ext4; it is not memory" in finding.found


@pytest.mark.parametrize(
    ("system", "option", "pages"),
    [
        ("never", "", "pages of {} (no option huge=)"),
        ("never", ",huge=always", "huge pages (huge=always)"),
        ("never", ",huge=within_size", "huge pages (huge=within_size)"),
        ("never", ",huge=advise", "pages of {} (huge=advise)"),
        ("always", "", "pages of {} (no option huge=)"),
        ("deny", ",huge=always", "pages of {} (shmem_enabled is deny)"),
        ("force", "", "huge pages (shmem_enabled is force)"),
    ],
)
def test_pages_of_the_shared_store(machine: Path, shared: Path, system: str, option: str, pages: str) -> None:
    mount_shared(machine, "tmpfs", f"rw,size=2097152k{option}")
    plant(machine, {"sys/kernel/mm/transparent_hugepage/shmem_enabled": f"always [{system}] other\n"})
    assert host_checks.shared_store().details == (pages.format(page_size()),)


def test_a_shared_store_that_cannot_be_used(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    finding = host_checks.shared_store()
    assert_complete(finding, Status.FAIL)
    assert f"{shared} (TMS_SHARED_DIR) is refused: the check that no other user can write to it" in finding.found
    for wrong, why in {
        str(shared / "deeper" / "store"): f"cannot be created, because there is no {shared}/deeper",
        "/proc/self/store": "cannot be written to: ",
        "relative": "is refused: TMS_SHARED_DIR must be an absolute path",
    }.items():
        shared.chmod(0o700)
        monkeypatch.setenv("TMS_SHARED_DIR", wrong)
        finding = host_checks.shared_store()
        assert_complete(finding, Status.FAIL)
        assert why in finding.found


def test_a_shared_store_with_a_damaged_key(shared: Path) -> None:
    shared.mkdir(mode=0o700)
    (shared / "key").write_bytes(b"")
    (shared / "key").chmod(0o400)
    finding = host_checks.shared_store()
    assert_complete(finding, Status.FAIL)
    assert f"could not be used: the key '{shared}/key' is no key of this package" in finding.found
