"""Guards vLLM's load format torch_memory_saver: a restarted engine adopts what the first one has published and processes it
as if it had loaded it, whatever differs loads, and nothing that goes wrong keeps an engine from its weights. Each process
runs programs/vllm_loader.py, with a stand-in for vLLM."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gpu_support import torch
from second_process import SecondProcess

WIDTH = 512


class Started(NamedTuple):
    loads: int
    warnings: list[str]
    contents: str


class Process(SecondProcess):
    """programs/vllm_loader.py with its store in `folder`."""

    def __init__(self, folder: Path, checkpoint: Path, *environment: tuple[str, str]) -> None:
        super().__init__((("TMS_SHARED_DIR", str(folder)), *environment), "vllm_loader.py")
        self._checkpoint = checkpoint

    def ask(self, *words: object) -> str:
        self.tell(*words)
        answer = self.answer()
        assert answer.startswith("ok"), f"{' '.join(map(str, words))}: {answer}"
        return answer.removeprefix("ok").strip()

    def start(self, **settings: Any) -> Started:
        settings = {"model": str(self._checkpoint), **settings}
        return Started(*json.loads(self.ask("engine", json.dumps(settings, separators=(",", ":")))))

    def names(self) -> list[str]:
        return list(json.loads(self.ask("names")))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "Small-1B"
    folder.mkdir()
    save(folder, 1)
    return folder


def save(checkpoint: Path, seed: int) -> None:
    """Writes the weights as one who replaces a checkpoint does."""
    rows = {"embedding": 1000, "up": WIDTH, "down": WIDTH}
    numbers = torch.Generator().manual_seed(seed)
    named = {f"{name}.weight": torch.randn(WIDTH, columns, generator=numbers) for name, columns in rows.items()}
    named["up.scale"], named["down.scale"] = torch.full((1,), 0.5), torch.full((1,), 2.0)
    torch.save(named, checkpoint / "new")
    os.replace(checkpoint / "new", checkpoint / "model.pt")


@pytest.mark.parametrize("quantization", [None, "repacked"])
@pytest.mark.parametrize("sleeps", [True, False], ids=["managed", "ordinary"])
def test_a_restarted_engine_adopts(quantization: str | None, sleeps: bool, folder: Path, checkpoint: Path) -> None:
    settings = {"quantization": quantization, "enable_sleep_mode": sleeps}
    with Process(folder, checkpoint) as process:
        plain = process.start(load={}, **settings)
        assert process.names() == []
        first = process.start(**settings)
        assert first == plain == (1, [], plain.contents)
        (name,) = process.names()
        assert name.startswith(f"vllm/Small-1B/{quantization or 'bfloat16'}/rank0/")
    with Process(folder, checkpoint) as process:
        assert process.start(**settings) == (0, [], plain.contents)
        assert process.names() == [name]
        if sleeps:
            assert int(process.ask("sleep")) > 0
            assert json.loads(process.ask("wake")) == plain.contents
        # What a later load sets is not published, because processing has changed the model.
        if quantization is None:
            save(checkpoint, 2)
            assert process.ask("reload") == "1"
            changed = process.start(**settings)
            assert changed.loads == 1 and changed.contents != plain.contents


def test_another_identity_loads(folder: Path, checkpoint: Path) -> None:
    with Process(folder, checkpoint) as process:
        first = process.start()
        for settings in (
            {"rank": 1},
            {"parallel": {"tensor_parallel_size": 2}},
            {"parallel": {"pipeline_parallel_size": 2}},
            {"parallel": {"data_parallel_size": 2}},
            {"parallel": {"data_parallel_rank": 1}},
            {"parallel": {"enable_expert_parallel": True}},
            {"dtype": "float16"},
            {"quantization": "repacked"},
            {"max_model_len": 8192},
            {"revision": "other"},
            {"load": {"load_format": "torch_memory_saver", "model_loader_extra_config": {"load_format": "pt"}}},
        ):
            found = process.start(**settings)
            assert (found.loads, found.warnings) == (1, []), settings
            assert process.start(**settings) == (0, [], found.contents), settings
        assert process.start() == (0, [], first.contents)
        assert len(process.names()) == 12


def test_a_changed_checkpoint_takes_the_place_of_the_old_one(folder: Path, checkpoint: Path) -> None:
    with Process(folder, checkpoint) as process:
        first = process.start()
    save(checkpoint, 2)
    with Process(folder, checkpoint) as process:
        plain = process.start(load={})
        assert plain.contents != first.contents
        found = process.start()
        assert (found.loads, found.contents) == (1, plain.contents)
        (warning,) = found.warnings
        assert "identity" in warning
        assert process.start() == (0, [], plain.contents)
        assert len(process.names()) == 1


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({"quantization": "online"}, ("/online/", "'down.weight'", "device meta")),
        ({"architecture": "AttributeModel"}, ("'up.w_kc'", "not published")),
        (
            {"load": {"model_loader_extra_config": {"load_format": "fastsafetensors"}}},
            ("Small-1B", "'fastsafetensors'", "auto"),
        ),
    ],
    ids=["quantised-while-loading", "an-attribute", "a-format"],
)
def test_what_tensors_do_not_describe_is_named_and_loaded(
    settings: dict[str, Any], texts: tuple[str, ...], folder: Path, checkpoint: Path
) -> None:
    load = settings.pop("load", {})
    format_of_files = load.get("model_loader_extra_config", {}).get("load_format", "auto")
    with Process(folder, checkpoint) as process:
        plain = process.start(load={"load_format": format_of_files}, **settings)
        found = process.start(load={"load_format": "torch_memory_saver", **load}, **settings)
        assert (found.loads, found.contents) == (1, plain.contents)
        (warning,) = found.warnings
        for text in texts:
            assert text in warning
        assert process.names() == []


def test_a_damaged_object_is_a_load_with_a_warning(folder: Path, checkpoint: Path) -> None:
    with Process(folder, checkpoint) as process:
        first = process.start()
    path = max((folder / "objects").iterdir(), key=lambda each: each.stat().st_size)
    path.chmod(0o600)
    with open(path, "r+b") as file:
        file.seek(1000)
        file.write(bytes([file.read(1)[0] ^ 16]))
    with Process(folder, checkpoint) as process:
        found = process.start()
        assert (found.loads, found.contents) == (1, first.contents)
        (warning,) = found.warnings
        assert path.name in warning
        assert process.start() == (0, [], first.contents), "the damaged object was published again"


def test_weights_that_do_not_fit_into_host_memory_are_a_warning(folder: Path, checkpoint: Path) -> None:
    with Process(folder, checkpoint, ("TMS_HOST_MEMORY_LIMIT_MB", "1")) as process:
        plain = process.start(load={})
        found = process.start()
        assert (found.loads, found.contents) == (1, plain.contents)
        (warning,) = found.warnings
        assert "not published" in warning and "TMS_HOST_MEMORY_LIMIT_MB" in warning
        assert process.names() == []


def test_missing_files_fail_as_without_the_store(folder: Path, checkpoint: Path) -> None:
    (checkpoint / "model.pt").unlink()
    with Process(folder, checkpoint) as process:
        assert "Cannot find any model weights" in process.refuses(
            "RuntimeError", "engine", json.dumps({"model": str(checkpoint)}, separators=(",", ":"))
        )


def test_a_disabled_process_loads(folder: Path, checkpoint: Path) -> None:
    with Process(folder, checkpoint) as process:
        first = process.start(enable_sleep_mode=False)
    with Process(folder, checkpoint, ("TMS_DISABLE", "1")) as process:
        assert process.start(enable_sleep_mode=False) == (1, [], first.contents)
        save(checkpoint, 2)
        process.start(enable_sleep_mode=False)
    with Process(folder, checkpoint) as process:
        assert process.start(enable_sleep_mode=False).loads == 1, "a disabled process has published"
