"""Fixtures and rules of the GPU tests.

The files of this folder run twice: in a pytest without LD_PRELOAD (hook mode "torch"), and in one with our library
preloaded (hook mode "preload"), which `run --preload` or `simulate --preload` has started. Tests that start processes for
both modes themselves are marked `outer` and run in the first only.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import tested_versions
from garbage import set_survivors_aside
from not_imported import NotImported

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))

from gpu_support import (
    MIB,
    SIMULATED,
    STARTED_PRELOADED,
    checksum,
    core,
    empty,
    fill_random,
    release_everything,
    saver,
    torch,
)
from importers import Importer

#: Files whose tests say the same in both hook modes. The modes differ in how PyTorch's allocations come into managed memory
#: and go back. These tests look at what is computed, refused, found, printed or sent once the memory is there. In hook mode
#: preload `.ci/run` leaves them out (-m "not either_mode"); all other runs have them in both.
EITHER_MODE = frozenset(
    f"test_{name}.py"
    for name in (
        "backup",
        "capture_step",
        "capture_step_refusals",
        "changed_contents",
        "check_fresh",
        "events",
        "graph_report",
        "held_memory",
        "layer_graphs",
        "layer_graphs_calls",
        "leak_recording",
        "manage_modules",
        "manage_optimizers",
        "manage_refusals",
        "manage_wrappers",
        "memory_compare",
        "memory_log",
        "memory_viz",
        "node_store",
        "partial_capture",
        "ranks",
        "sglang_loader",
        "shared_page",
        "shared_rl_loop",
        "sharing_lifetimes",
        "sharing_patterns",
        "sharing_pauses",
        "sharing_permissions",
        "sharing_random",
        "stats",
        "tag_patterns",
        "tensors_of_tensors",
        "vllm_loader",
    )
)
#: Seconds after which a test of this folder counts as hung.
TEST_TIMEOUT_S = 120

_FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU, a real or a simulated one; run with --gpu")
    config.addinivalue_line("markers", "multigpu: needs two GPUs; run with --gpu")
    config.addinivalue_line("markers", "real_gpu: shows something that the simulated GPU does not have")
    config.addinivalue_line("markers", "outer: starts processes for both hook modes itself; runs once")
    config.addinivalue_line(
        "markers", "either_mode: says the same in both hook modes (EITHER_MODE of tests/gpu/conftest.py)"
    )
    config.addinivalue_line("markers", "timeout: of pytest-timeout, where it is installed")
    if not SIMULATED and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
        os.environ["CUDA_VISIBLE_DEVICES"] = worker.removeprefix("gw")  # with -n each process has a GPU of its own
    missing = [name for name in sorted(EITHER_MODE) if not (Path(__file__).parent / name).is_file()]
    assert missing == [], "files of EITHER_MODE that are not there"
    if file := os.environ.pop(tested_versions.VARIABLE, None):  # not for a pytest that a test starts
        tested_versions.refuse_a_part(config)
        recorder = tested_versions.Recorder(Path(file).resolve(), "preload" if STARTED_PRELOADED else "torch")
        config.pluginmanager.register(recorder, tested_versions.VARIABLE)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if parent.config.getoption("--gpu", default=False):
        return None
    return NotImported.made(module_path, parent, "needs a GPU: run pytest with --gpu")


def _reason_to_skip(item: pytest.Item) -> str | None:
    try:
        devices = torch.cuda.device_count()
    except ImportError as error:
        return f"needs PyTorch: {error}"
    if devices == 0 and not SIMULATED and "PYTEST_XDIST_WORKER" in os.environ:
        return "needs a GPU of its own: -n is larger than the number of GPUs"
    if devices == 0:
        return "needs a GPU, and torch sees none"
    if SIMULATED and (marker := item.get_closest_marker("real_gpu")) is not None:
        return f"needs a real GPU: {marker.args[0]}"
    if STARTED_PRELOADED and item.get_closest_marker("outer") is not None:
        return "only in hook mode torch: starts processes for both hook modes itself"
    if item.get_closest_marker("multigpu") is not None and devices < 2:
        return f"needs two GPUs, and torch sees {devices}"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).resolve().parent
    for item in items:
        if here in item.path.parents:
            if item.get_closest_marker("multigpu") is None:
                item.add_marker(pytest.mark.gpu)
            if config.pluginmanager.hasplugin("timeout") and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))
            if item.path.name in EITHER_MODE:
                item.add_marker(pytest.mark.either_mode)
            reason = _reason_to_skip(item)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
        _drop_locals(None if call.excinfo is None else call.excinfo.value)
    return report


def _drop_locals(failure: BaseException | None) -> None:
    """Clear the variables in the frames of a failure that has been reported, because they keep its tensors alive."""
    while failure is not None:
        traceback.clear_frames(failure.__traceback__)
        for frame, _ in traceback.walk_tb(failure.__traceback__):
            _ = frame.f_locals  # before Python 3.13 pytest's query has left a copy of them, which the next one updates
        failure = failure.__cause__ or failure.__context__


@pytest.fixture(scope="session")
def warm_gpu() -> None:
    """Loads the kernels that the tests use, so that lazy loading does not affect memory readings."""
    tensor = empty(8 * MIB)
    fill_random(tensor, 0)
    checksum(tensor)
    tensor.fill_(1)
    assert int(tensor.min()) == int(tensor.max()) == 1
    bool((tensor == tensor.clone()).all())
    torch.equal(tensor, tensor.clone())
    numbers = torch.arange(1024, device="cuda", dtype=torch.float32)
    (numbers * 2 + 1).sum().item()
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    gc.collect()
    gc.freeze()  # the modules' objects stay


@pytest.fixture(autouse=True)
def clean_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test starts with nothing managed and nothing recorded, and a passing test leaves it so."""
    if request.node.get_closest_marker("outer") is not None:
        yield
        return
    request.getfixturevalue("warm_gpu")
    release_everything()
    set_survivors_aside()
    yield
    try:
        torch.cuda.synchronize()
    except Exception as error:  # the context is lost: every further test of this process would fail because of it
        pytest.exit(f"the CUDA context was lost in {request.node.nodeid}: {error}", returncode=1)
    saver.retain_cpu_backup = False
    saver.memory_margin_bytes = 0
    saver.resume()
    was_recording = torch._C._cuda_isHistoryEnabled()
    torch.cuda.memory._record_memory_history(None)
    release_everything()
    if request.node.stash.get(_FAILED, False):
        return
    assert not was_recording, "the test has left PyTorch recording its allocations"
    counters = core.counters()
    left = {name: counters[name] for name in ("allocations", "resident_bytes", "paused_bytes", "host_backup_bytes")}
    left |= {name: counters[name] for name in ("disk_backup_bytes", "shared_backup_bytes", "damaged")}
    left |= {name: counters[name] for name in ("deferred_frees", "visible_captures")}
    left |= {name: counters[name] for name in ("quarantined_handles", "quarantined_ranges")}
    assert not any(left.values()), f"left behind by the test: {left}; {core.segments()}"


@pytest.fixture
def mode() -> str:
    """The hook mode that this process runs in: "torch" or "preload"."""
    return "preload" if core.preloaded else "torch"


@pytest.fixture(scope="module")
def importer() -> Iterator[Importer]:
    """A process that imports the tensors of the tests of one file."""
    with Importer() as process:
        yield process


@pytest.fixture
def folder() -> Iterator[Path]:
    """The path of a shared store of the test's own, in memory. Nothing is there yet."""
    parent = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield parent / "store"
    shutil.rmtree(parent)


@pytest.fixture
def shared_device() -> None:
    """Other processes use this one's device: on the simulated GPU processes share a budget only by name, which `simulate`
    sets."""
    if SIMULATED and not os.environ.get("TMS_SIMULATED_SHARED"):
        pytest.skip("the simulated GPU of this process is its own")
