"""The variables of vLLM that its compile cache depends on."""

from __future__ import annotations

import os


def compile_factors() -> dict[str, object]:
    return {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
