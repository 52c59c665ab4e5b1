"""CUDA graphs stay valid: captured before the pause, replayed right after the resume.

A graph has recorded addresses, and those do not change. `torch_memory_saver.cuda_graph()` takes the place of
`torch.cuda.graph()`: what the graph itself allocates is managed too and can be paused under a tag of its own. Several
graphs may share one pool by a token, as inference engines do for their batch sizes.

    python examples/cuda_graph.py
"""

import torch
from _common import GIB, check, check_bytes, free_bytes, options

from torch_memory_saver import torch_memory_saver

BATCHES = (8, 4, 1)


def main() -> None:
    size = int(options(__doc__, gib=2).parse_args().gib * GIB)
    width = 4096
    layers = max(1, size // (width * width * 2))

    with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
        weights = [torch.empty(width, width, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    for weight in weights:
        weight.normal_(std=width**-0.5)
    tokens = torch.randn(max(BATCHES), width, device="cuda").to(torch.bfloat16)

    def decode(batch: int) -> torch.Tensor:
        hidden = tokens[:batch]
        for weight in weights:
            hidden = torch.nn.functional.silu(hidden @ weight)
        return hidden

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # cuBLAS wants its first call before a capture
        expected = {batch: decode(batch).clone() for batch in BATCHES}
    torch.cuda.current_stream().wait_stream(side)

    pool = torch.cuda.graph_pool_handle()
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
    for batch in BATCHES:
        graph = torch.cuda.CUDAGraph()
        with torch_memory_saver.cuda_graph(graph, pool=pool, tag="cuda_graph"):
            output = decode(batch)
        graphs[batch] = (graph, output)
    tags = torch_memory_saver.stats().tags
    held = tags["weights"].resident_bytes + tags["cuda_graph"].resident_bytes
    print(f"{len(graphs)} graphs over {layers} matrices, {held / GIB:.2f} GiB of weights and graph memory.")

    before = free_bytes()
    torch_memory_saver.pause("weights")
    torch_memory_saver.pause("cuda_graph")
    check_bytes(free_bytes() - before, held, "given back by weights and graphs")
    other = torch.full((held // 2,), 0xFF, dtype=torch.uint8, device="cuda")
    check(bool((other[: 1 << 20] == 0xFF).all()), "somebody else has used the memory")
    del other
    torch.cuda.empty_cache()
    torch_memory_saver.resume("cuda_graph")
    torch_memory_saver.resume("weights")

    for batch, (graph, output) in graphs.items():
        graph.replay()
        torch.cuda.synchronize()
        check(
            torch.allclose(output, expected[batch], rtol=2e-2, atol=2e-2), f"the graph for batch {batch} gives what it gave"
        )


if __name__ == "__main__":
    main()
