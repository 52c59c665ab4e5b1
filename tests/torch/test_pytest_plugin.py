"""Guards what the pytest plugin does around a test: the limit of its memory, lost devices, the fixture with the saver."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

TESTS = """
import pytest
import torch

MIB = 1 << 20


@pytest.mark.device_memory("64 MiB")
def test_within():
    torch.ones(15 * MIB, device="cuda")
    torch.ones(15 * MIB, device="cuda")


@pytest.mark.device_memory(64 * MIB)
def test_over():
    weights = torch.ones(10 * MIB, device="cuda")
    cache = torch.ones(20 * MIB, device="cuda")
    del weights, cache
    torch.ones(5 * MIB, device="cuda")


@pytest.mark.device_memory("64 MB")
def test_no_size():
    pass


@pytest.mark.parametrize("waits", [False, True])
def test_loses(torch_memory_saver, waits):
    with torch_memory_saver.region("kv_cache"):
        cache = torch.ones(MIB, device="cuda")
    torch_memory_saver.pause()
    cache.add_(1)
    if waits:
        torch.cuda.synchronize()


def test_next(torch_memory_saver):
    stats = torch_memory_saver.stats()
    assert stats.total.allocations == 0
    with torch_memory_saver.region("kv_cache"):
        cache = torch.ones(MIB, device="cuda")
    assert cache.sum().item() == MIB
    torch_memory_saver.pause()


def test_last():
    from torch_memory_saver import torch_memory_saver
    assert torch_memory_saver.stats().total == type(torch_memory_saver.stats().total)(resident_peak_bytes=20 * MIB)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What pytest prints of each test that fails, by name."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "test_them.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "torch_memory_saver_pytest"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # else an installed plugin is registered twice
    done = subprocess.run(
        [*command, "--tb=short"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    parts = re.split(r"^_+ (test_\S+) _+$", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_peak_of_a_test_has_a_limit(results: dict[str, str]) -> None:
    assert "test_within" not in results
    assert "the test has allocated up to 120 MiB of GPU 0, more than its limit of 64 MiB" in results["test_over"]
    assert re.findall(r"- (\d+ MiB) at test_them.py:\d+ in test_over", results["test_over"]) == ["80 MiB", "40 MiB"]
    assert "@pytest.mark.device_memory: '64 MB' is not a size" in results["test_no_size"]


def test_a_test_that_loses_the_device_ends_alone(results: dict[str, str]) -> None:
    unread, read = results["test_loses[False]"], results["test_loses[True]"]
    assert "The test has lost a simulated GPU: an illegal memory access was encountered: aten::add_" in unread
    assert "AcceleratorError: CUDA error: an illegal memory access" in read
    assert "The test has lost a simulated GPU. The next test gets it back." in read
    assert sorted(results) == ["test_loses[False]", "test_loses[True]", "test_no_size", "test_over"], "the others pass"
