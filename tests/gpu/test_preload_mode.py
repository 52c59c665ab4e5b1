"""Runs the scenarios of this folder once more, in a pytest whose process has our library preloaded (hook mode "preload").

On the simulated GPU they run a second time from outside, under `simulate --preload`.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import tested_versions
from gpu_programs import subprocess_run
from gpu_support import HERE, INNER, release_everything, torch

pytestmark = [pytest.mark.outer, pytest.mark.timeout(920)]

#: Seconds for the whole inner run.
INNER_TIMEOUT_S = 900


@pytest.mark.real_gpu("simulate --preload runs the scenarios again")
def test_every_scenario_in_preload_mode(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if torch.cuda.is_initialized():
        release_everything()  # the inner run needs most of the GPU
    results = tmp_path / "results.xml"
    recorder = request.config.pluginmanager.get_plugin(tested_versions.VARIABLE)
    done = subprocess_run(
        [
            "-m",
            "pytest",
            "--gpu",
            str(HERE),
            "-q",
            "-rs",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            f"--junitxml={results}",
            f"--rootdir={request.config.rootpath}",
        ],
        environment={INNER: "1"} | ({tested_versions.VARIABLE: str(recorder.file)} if recorder is not None else {}),
        preload=True,
        timeout=INNER_TIMEOUT_S,
    )
    print(done.output)
    assert results.exists(), f"the inner pytest did not finish: status {done.status}\n{done.output}\n{done.error}"
    suites = ElementTree.parse(results).getroot().iter("testsuite")
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        for name in counts:
            counts[name] += int(suite.get(name, "0"))
    summary = re.sub(r"\s+", " ", done.output.strip().splitlines()[-1])
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    assert done.status == 0, f"in preload mode: {summary}\n{done.output}\n{done.error}"
    assert passed > 0
    # Shown by `pytest -rP`, and in the report of anyone who reads properties.
    print(f"in preload mode: {passed} passed, {counts['skipped']} skipped")
    request.node.user_properties.append(("preload_mode", counts))
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"\nscenarios in preload mode: {passed} passed, {counts['skipped']} skipped")
