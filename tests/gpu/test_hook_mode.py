"""Guards the hook mode of this run of the scenarios: otherwise a preload that does not work would go undetected."""

from __future__ import annotations

import os

from gpu_support import STARTED_PRELOADED, core, saver


def test_this_run_is_in_the_hook_mode_that_it_claims(mode: str) -> None:
    expected = "preload" if STARTED_PRELOADED else "torch"
    assert mode == expected
    with saver.region(tag="weights"):
        pass
    assert saver.hook_mode == expected
    assert ("hook_mode_preload" in os.path.basename(core.library_path)) == (expected == "preload")
