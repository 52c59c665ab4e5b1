"""Guards the plug-in of vLLM: what it changes in vLLM, and that it changes nothing unless its backend is selected."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from processes import Program
from vllm_engine import ENTRY_POINT, load_plugin, make_worker, stand_in

import torch_memory_saver
from torch_memory_saver import _patches
from torch_memory_saver._patches import all_patches
from torch_memory_saver.errors import OutOfHostMemoryError

PYPROJECT = Path(__file__).resolve().parents[4] / "pyproject.toml"
BY_NAME = ("vllm.v1.worker.gpu_worker", "vllm.compilation.cudagraph_pool")
NAME = "get_mem_allocator_instance"
GROUP = re.compile(r'^\[project.entry-points."vllm.general_plugins"\]\n(\w+) = "(\S+)"$', re.MULTILINE)


@pytest.fixture(autouse=True)
def fresh_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_patches, "_places", {})  # of the stand-ins before
    with stand_in():
        yield


def find_allocators() -> list[Any]:
    """What each module of vLLM finds now."""
    return [getattr(import_module(name), NAME)() for name in ("vllm.device_allocator", *BY_NAME)]


def vllms_own() -> Any:
    return import_module("vllm.device_allocator.cumem").CuMemAllocator.get_instance()


def test_the_package_declares_the_entry_point() -> None:
    declared = GROUP.search(PYPROJECT.read_text())
    assert declared is not None
    assert declared.groups() == (ENTRY_POINT.name, ENTRY_POINT.value)


def test_importing_it_imports_neither_vllm_nor_torch(program: Program) -> None:
    done = program(
        "import sys, torch_memory_saver.vllm\nprint([name for name in ('vllm', 'torch') if name in sys.modules])",
        preloaded=False,
    )
    assert done.stdout == "[]\n"


def test_loading_it_loads_no_driver(program: Program) -> None:
    """vLLM loads plug-ins in every process, before it forks some."""
    done = program(
        f"import sys; sys.path.insert(0, {str(Path(import_module('vllm_engine').__file__ or '').parent)!r})\n"
        "from vllm_engine import load_plugin, make_worker, stand_in\n"
        "with stand_in():\n"
        "    load_plugin(); make_worker()\n"
        "    print('torch' in sys.modules, '_simulated_cuda' in open('/proc/self/maps').read())",
        preloaded=False,
    )
    assert done.stdout == "False False\n"


@pytest.mark.parametrize("imported", [(), BY_NAME], ids=["imported-later", "imported-before"])
def test_each_module_gets_our_allocator_if_the_worker_selects_it(imported: tuple[str, ...]) -> None:
    for name in imported:
        import_module(name)
    plugin = load_plugin()
    make_worker()
    assert find_allocators() == [plugin.allocator] * 3


@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "cumem"},
        {"enable_sleep_mode": False},
        {"enable_sleep_mode": False, "enable_cumem_allocator": True},
    ],
    ids=["another-backend", "no-sleep-mode", "allocator-only"],
)
def test_otherwise_vllms_own_allocator_stays(settings: dict[str, Any]) -> None:
    load_plugin()
    make_worker(**settings)
    assert find_allocators() == [vllms_own()] * 3


def test_without_a_worker_vllms_own_allocator_stays() -> None:
    load_plugin()
    assert find_allocators() == [vllms_own()] * 3


def test_a_worker_of_vllms_own_backend_calls_what_it_called_before() -> None:
    load_plugin()
    worker = make_worker("cumem", sleep_mode_offload_cudagraph=True)
    worker.load_model(lambda: None)
    worker.sleep(2)
    worker.wake_up(["weights"])
    worker.discard(("kv_cache",))
    with import_module("vllm.compilation.cudagraph_pool").capture_pool((1, 2), worker.vllm_config) as pool:
        assert pool == (0, 7)
    assert vllms_own().calls == [
        ("use_memory_pool", "weights"),
        ("sleep", ("runtime", "cudagraph")),
        ("wake_up", ["weights"]),
        ("discard", ("kv_cache",)),
        ("cudagraph_pool", None),
    ]


def test_the_newest_worker_that_can_sleep_decides() -> None:
    plugin = load_plugin()
    make_worker()
    make_worker("cumem", enable_sleep_mode=False)
    assert find_allocators() == [plugin.allocator] * 3
    make_worker("cumem")
    assert find_allocators() == [vllms_own()] * 3
    make_worker()
    assert find_allocators() == [plugin.allocator] * 3


def test_a_configuration_without_a_model_is_no_selection() -> None:
    load_plugin()
    config = import_module("vllm.config").VllmConfig(model_config=None)
    import_module("vllm.v1.worker.worker_base").WorkerBase(config, 0, 0)
    assert not config.use_cumem_cudagraph_pool
    assert find_allocators() == [vllms_own()] * 3


def replaced_in_vllm() -> list[str]:
    return [patch.name for patch in torch_memory_saver.patches() if patch.name.startswith("vllm.")]


def attributes() -> dict[tuple[str, str], Any]:
    """What the modules of vLLM and the classes in them have."""
    modules = [each for name, each in sys.modules.items() if name.split(".")[0] == "vllm"]
    classes = [each for module in modules for each in vars(module).values() if isinstance(each, type)]
    cached_by_pickle = ("__slotnames__",)
    return {
        (owner.__name__, name): value
        for owner in [*modules, *classes]
        for name, value in vars(owner).items()
        if name not in cached_by_pickle
    }


@pytest.mark.parametrize("settings", [{"backend": "cumem"}, {"enable_sleep_mode": False}], ids=["another", "no-sleep"])
def test_without_a_selection_nothing_but_the_look_at_workers_is_replaced(settings: dict[str, Any]) -> None:
    for name in (*BY_NAME, "vllm.device_allocator.cumem", "vllm.device_allocator.sleep_mode_backend"):
        import_module(name)
    before = attributes()
    load_plugin()
    assert make_worker(**settings).vllm_config.use_cumem_cudagraph_pool is False
    after = attributes()
    assert [place for place in after if after[place] is not before.get(place)] == [("WorkerBase", "__init__")]
    assert replaced_in_vllm() == ["vllm.v1.worker.worker_base.WorkerBase.__init__"]


def test_a_selection_replaces_what_the_table_lists(caplog: pytest.LogCaptureFixture) -> None:
    load_plugin()
    make_worker()
    assert replaced_in_vllm() == [patch.name for patch in all_patches() if patch.name.startswith("vllm.")]


def test_loading_it_again_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    load_plugin()
    modules = [import_module(name) for name in ("vllm.device_allocator", *BY_NAME)]
    worker_base, config = import_module("vllm.v1.worker.worker_base"), import_module("vllm.config")
    before = [*(getattr(module, NAME) for module in modules), worker_base.WorkerBase.__init__]
    before.append(vars(config.VllmConfig)["use_cumem_cudagraph_pool"])
    load_plugin()
    after = [*(getattr(module, NAME) for module in modules), worker_base.WorkerBase.__init__]
    after.append(vars(config.VllmConfig)["use_cumem_cudagraph_pool"])
    assert after == before
    assert not caplog.records


def test_the_plugin_loads_in_a_process_whose_modules_have_odd_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "no_module", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "an_object", object())  # type: ignore[arg-type]
    plugin = load_plugin()
    make_worker()
    assert find_allocators() == [plugin.allocator] * 3


def test_the_worker_gets_our_backend() -> None:
    load_plugin()
    backend = make_worker().sleep_mode_backend
    base = import_module("vllm.device_allocator.sleep_mode_backend").SleepModeBackend
    assert type(backend).__name__ == "SleepBackend"
    assert isinstance(backend, base)
    assert backend.state() == "RUNNING"
    assert backend.preserves_communicators()
    assert backend.preserves_compiled_artifacts()
    assert not backend.preserves_graphs_with_communicators()
    assert not backend.supports_durable_storage()


@pytest.mark.parametrize("exception", [OutOfHostMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(("is_asleep", "state"), [(True, "SUSPENDED"), (False, "RUNNING")])
@pytest.mark.parametrize(("call", "method"), [("suspend", "sleep"), ("resume", "wake_up"), ("discard", "discard")])
def test_the_state_after_a_failure_says_whether_memory_is_asleep(
    call: str, method: str, is_asleep: bool, state: str, exception: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleep consists of two pauses, the second of which may fail."""
    allocator = load_plugin().allocator

    def fail(tags: object = None) -> None:
        monkeypatch.setattr(type(allocator), "is_asleep", is_asleep)
        raise exception("no")

    monkeypatch.setattr(allocator, method, fail)
    backend = make_worker().sleep_mode_backend
    with pytest.raises(exception):
        getattr(backend, call)(*([("kv_cache",)] if call == "discard" else []))
    assert backend.state() == state


@pytest.mark.parametrize("kind", ["rocm", "xpu"])
def test_on_another_platform_vllm_refuses_the_backend(kind: str) -> None:
    import_module("vllm.platforms").current_platform.kind = kind
    load_plugin()
    worker = make_worker()
    assert find_allocators() == [vllms_own()] * 3
    with pytest.raises(ValueError, match="does not support this platform"):
        worker.sleep()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sleep_mode_offload_cudagraph": True}, True),
        ({}, False),
        ({"sleep_mode_offload_cudagraph": True, "enable_sleep_mode": False}, False),
        ({"sleep_mode_offload_cudagraph": True, "backend": "cumem"}, True),
        ({"sleep_mode_offload_cudagraph": True, "backend": "other"}, False),
    ],
    ids=["ours", "ours-not-requested", "no-sleep-mode", "vllms-own", "another"],
)
def test_graphs_are_released_with_our_backend_as_with_vllms_own(settings: dict[str, Any], expected: bool) -> None:
    load_plugin()
    config = make_worker(**settings).vllm_config
    assert config.use_cumem_cudagraph_pool is expected
    config.captures_graphs = False
    assert not config.use_cumem_cudagraph_pool


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sleep_mode_offload_cudagraph": True}, "0"),
        ({}, None),
        ({"sleep_mode_offload_cudagraph": True, "backend": "other"}, None),
    ],
    ids=["ours", "ours-not-requested", "another"],
)
def test_nccl_does_not_register_graphs_that_sleeping_releases(
    settings: dict[str, Any], expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    load_plugin()
    make_worker(**settings)
    assert os.environ.get("NCCL_GRAPH_REGISTER") == expected
    assert caplog.messages == []
    os.environ["NCCL_GRAPH_REGISTER"] = "1"
    make_worker(**settings)
    assert os.environ["NCCL_GRAPH_REGISTER"] == "1"
    warning = (
        "NCCL_GRAPH_REGISTER=1: NCCL registers the memory of CUDA graphs, which a sleep cannot release then. Set it to 0."
    )
    assert caplog.messages == ([] if expected is None else [warning])


# -- the load format ----------------------------------------------------------------------------------------------------

OURS = {"load_format": "torch_memory_saver"}


def load_formats() -> dict[str, str]:
    """The loaders that differ from vLLM's own."""
    table = import_module("vllm.model_executor.model_loader")._LOAD_FORMAT_TO_MODEL_LOADER
    return {name: each.__module__ for name, each in table.items() if not each.__module__.startswith("vllm.")}


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_worker_that_selects_the_load_format_gets_it(sleeps: bool) -> None:
    load_plugin()
    make_worker(enable_sleep_mode=sleeps)
    assert load_formats() == {}
    assert "torch_memory_saver.vllm.loader" not in sys.modules
    make_worker(load=OURS, enable_sleep_mode=sleeps)
    make_worker(load=OURS, enable_sleep_mode=sleeps)
    assert load_formats() == {"torch_memory_saver": "torch_memory_saver.vllm.loader"}


def test_a_draft_model_may_select_the_load_format() -> None:
    load_plugin()
    config = import_module("vllm.config")
    made = config.VllmConfig(config.ModelConfig())
    made.speculative_config = SimpleNamespace(draft_load_config=config.LoadConfig(**OURS))
    import_module("vllm.v1.worker.gpu_worker").Worker(made)
    assert load_formats() == {"torch_memory_saver": "torch_memory_saver.vllm.loader"}


def test_the_files_have_the_format_of_the_extra_configuration() -> None:
    load_plugin()
    loaders = import_module("vllm.model_executor.model_loader")
    for extra, expected in (({}, "auto"), ({"load_format": "pt"}, "pt")):
        given = make_worker(load={**OURS, "model_loader_extra_config": {**extra, "num_threads": 2}}).vllm_config.load_config
        loader = loaders.get_model_loader(given)
        assert (given.load_format, given.model_loader_extra_config) == ("torch_memory_saver", {**extra, "num_threads": 2})
        assert loader._loader.load_config.load_format == expected
        assert loader._loader.load_config.model_loader_extra_config == {"num_threads": 2}
    for wrong in ("dummy", "none"):
        given = make_worker(load={**OURS, "model_loader_extra_config": {"load_format": wrong}}).vllm_config.load_config
        if wrong == "none":
            with pytest.raises(ValueError, match="`none` is not supported"):
                loaders.get_model_loader(given)
        else:
            assert not hasattr(loaders.get_model_loader(given), "get_all_weights")


def test_a_release_whose_loaders_differ_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_plugin()
    monkeypatch.delattr(import_module("vllm.model_executor.model_loader"), "register_model_loader")
    make_worker(load=OURS)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "does not get the load format 'torch_memory_saver'" in record.getMessage()
    assert "register_model_loader" in record.getMessage()


# -- releases of vLLM that lack something ------------------------------------------------------------------------------


def assert_unchanged(caplog: pytest.LogCaptureFixture, level: int, lack: str) -> None:
    """The plug-in says what is missing, once, and leaves vLLM alone."""
    load_plugin()
    load_plugin()
    (record,) = caplog.records
    assert record.levelno == level
    assert "vLLM 0.33.0 does not get the sleep mode backend 'torch_memory_saver'" in record.message
    assert lack in record.message
    worker = import_module("vllm.v1.worker.worker_base").WorkerBase
    assert worker.__init__.__module__ == worker.__module__
    assert not hasattr(worker.__init__, "__wrapped__")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.device_allocator", NAME),
        ("vllm.device_allocator.sleep_mode_backend", "SleepModeBackendFactory"),
        ("vllm.config", "VllmConfig"),
        ("vllm.platforms", "current_platform"),
    ],
)
def test_a_missing_name_is_a_warning(
    module: str, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_module("vllm.v1.worker.gpu_worker")
    monkeypatch.delattr(import_module(module), name)
    assert_unchanged(caplog, logging.WARNING, f"module '{module}' has no attribute '{name}'")


def test_a_registry_of_another_kind_is_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    factory = import_module("vllm.device_allocator.sleep_mode_backend").SleepModeBackendFactory
    monkeypatch.delattr(factory, "register_backend")
    assert_unchanged(caplog, logging.WARNING, "no attribute 'register_backend'")


def test_a_moved_worker_is_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.v1.worker.worker_base"
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    load_plugin()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert name in record.message


def test_a_name_that_is_taken_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    factory = import_module("vllm.device_allocator.sleep_mode_backend").SleepModeBackendFactory
    factory.register_backend("torch_memory_saver", "elsewhere", "Backend")
    assert_unchanged(caplog, logging.WARNING, "there is a backend 'torch_memory_saver' already")


def test_a_release_before_backends_is_no_reason_for_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "torch_memory_saver")
    import_module("vllm")
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.sleep_mode_backend", None)  # type: ignore[arg-type]
    assert_unchanged(caplog, logging.INFO, "vllm.device_allocator.sleep_mode_backend")


def test_another_interface_of_the_graph_pool_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = import_module("vllm.device_allocator.cumem").CuMemAllocator
    monkeypatch.setattr(own, "use_cudagraph_pool", own.cudagraph_pool, raising=False)
    monkeypatch.setattr(own, "release_cudagraph_pool", lambda self: None, raising=False)
    monkeypatch.delattr(own, "cudagraph_pool")
    plugin = load_plugin()
    config = make_worker(sleep_mode_offload_cudagraph=True).vllm_config
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "does not have: release_cudagraph_pool, use_cudagraph_pool. A sleep does not release" in record.getMessage()
    assert config.use_cumem_cudagraph_pool is False
    assert find_allocators() == [plugin.allocator] * 3


def test_a_release_without_a_graph_pool_has_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    config: ModuleType = import_module("vllm.config")
    monkeypatch.delattr(config.VllmConfig, "use_cumem_cudagraph_pool")
    monkeypatch.setattr(config.VllmConfig, "__post_init__", lambda self: None)
    plugin = load_plugin()
    make_worker()
    assert find_allocators() == [plugin.allocator] * 3
    assert not hasattr(config.VllmConfig, "use_cumem_cudagraph_pool")
