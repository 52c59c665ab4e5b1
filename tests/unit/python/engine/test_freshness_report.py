"""Guards the report of check_fresh() as a table and as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_torch import FakeTorch
from fresh_checks import LIVE, MIB, cycle, in_region

from torch_memory_saver.reports import FreshReport, UnwrittenBlock
from torch_memory_saver.saver import TorchMemorySaver


def test_the_report_as_a_table() -> None:
    def block(address: int, **others: Any) -> UnwrittenBlock:
        sizes: dict[str, Any] = {"bytes": 1 << 20, "sampled_bytes": 512, "unwritten_bytes": 512}
        return UnwrittenBlock(**({"address": address, "device": 0, "tag": "weights"} | sizes | others))

    named = block(4096, dtype="float32", shape=(4096, 64), names=("Engine.rope.cos",))
    report = FreshReport(
        unwritten=(named, block(8192, bytes=4)),
        integers=(block(0, dtype="int32", shape=(8,), names=("A.a", "B.b", "C.c")),),
        partly_written=(block(1, unwritten_bytes=128),),
        ignored=(block(2, tag="kv_cache", bytes=3 << 30),),
        checked_blocks=7,
        checked_bytes=5 << 30,
        ignored_bytes=3 << 30,
        restored_bytes=700,
        graph_bytes=2 << 20,
        graph_unwritten_bytes=1 << 20,
        sampled_bytes=4096,
        hidden_objects=9,
    )
    assert str(report) == (
        "check_fresh: 2 findings in 7 blocks, 1 MiB of 5 GiB not written since the resume\n"
        "looked at 4 KiB, in samples; whole=True reads from end to end\n"
        "gc.freeze() hides objects of this process: pass modules=... to see their names\n"
        "\n"
        "Not written since the resume\n"
        "  1 MiB  Engine.rope.cos  float32 (4096, 64)  weights  device 0, 0x1000\n"
        "    4 B  -                no tensor found     weights  device 0, 0x2000\n"
        "\n"
        "Integers of -1 (255 in uint8): not restored, or written so\n"
        "  1 MiB  A.a, B.b and 1 more  int32 (8,)  weights  device 0, 0x0\n"
        "\n"
        "Written in parts: a cache that fills up, or a restoration that ended early\n"
        "  1 MiB  -  no tensor found  weights  device 0, 0x1  25% of it\n"
        "\n"
        "Ignored, and not written\n"
        "  3 GiB  -  no tensor found  kv_cache  device 0, 0x2\n"
        "\n"
        "Memory in which nothing is found\n"
        "  3 GiB  ignored\n"
        "  2 MiB  in pools of CUDA graphs, of which 1 MiB hold the pattern\n"
        "  700 B  restored from a backup\n"
    )
    many = FreshReport(unwritten=(named,) * 25, whole=True)
    assert "and 5 more" in str(many)
    assert "read from end to end" in str(many)
    assert str(FreshReport(checked_blocks=3)).startswith("check_fresh: no findings in 3 blocks, 0 B of 0 B not written")
    assert str(FreshReport(unwritten=(named,))).startswith("check_fresh: 1 finding in 0 blocks")


@pytest.mark.usefixtures("guard")
def test_the_report_as_json(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    address = in_region(saver, fake_torch)
    frames = [{"filename": "/srv/engine/rope.py", "line": 31, "name": "__init__"}]
    fake_torch.split(address, (2 * MIB, LIVE, {"frames": frames}))
    cycle(saver)
    report = saver.check_fresh()
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["unwritten"][0]["stack"]["frames"] == frames
    assert plain["unwritten"][0] | {"stack": None} == {
        "address": address,
        "bytes": 2 * MIB,
        "sampled_bytes": 512,
        "unwritten_bytes": 512,
        "device": 0,
        "tag": "w",
        "dtype": "",
        "shape": [],
        "names": [],
        "stack": None,
    }
    assert set(plain) == set(FreshReport.__dataclass_fields__)
    assert plain["checked_bytes"] == 2 * MIB
