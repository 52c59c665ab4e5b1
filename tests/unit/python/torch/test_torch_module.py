"""Guards what is said if PyTorch finds no device: the variable or the option that is the reason, and what to do."""

from __future__ import annotations

import pytest

from torch_memory_saver._torch.binding.torch_module import why_no_device

_DOCTOR = "check the driver by `doctor`; on a machine without a GPU, run the program by `python -m torch_memory_saver"


@pytest.mark.parametrize(
    ("simulated", "visible", "text"),
    [
        ("0", "3", "the simulated machine has none: start it with `simulate --devices 1` or more"),
        ("2", "3", "CUDA_VISIBLE_DEVICES is '3': unset it, or name devices that are there; the simulated machine has 2"),
        (None, "", f"CUDA_VISIBLE_DEVICES is '': unset it, or name devices that are there; otherwise {_DOCTOR}"),
        (None, None, _DOCTOR),
    ],
)
def test_the_reason(monkeypatch: pytest.MonkeyPatch, simulated: str | None, visible: str | None, text: str) -> None:
    for name, value in (("TMS_SIMULATED_DEVICES", simulated), ("CUDA_VISIBLE_DEVICES", visible)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert why_no_device().startswith(text)
