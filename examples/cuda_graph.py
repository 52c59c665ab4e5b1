"""CUDA graphs stay valid: they are captured before the pause and replayed right after the resume.

A graph records addresses, and addresses do not change. `torch_memory_saver.cuda_graph()` replaces `torch.cuda.graph()`:
the graph's own memory is then managed too, and can be paused under a separate tag. Several graphs may share one pool by a
token, as the graphs of an inference engine for its batch sizes do.

    python examples/cuda_graph.py
"""

import torch
from _common import GIB, MIB, check, check_bytes, checksum, fill_random, free_bytes, options, show, total

from torch_memory_saver import torch_memory_saver

BATCHES = (8, 4, 1)
LAYER_BYTES = 32 * MIB


def main() -> None:
    size = int(options(__doc__, gib=2).parse_args().gib * GIB)
    layers = max(1, size // LAYER_BYTES)
    shape = (max(BATCHES), LAYER_BYTES // max(BATCHES) // 4)

    with torch_memory_saver.region(tag="weights", backup="host"):
        weights = [torch.empty(shape, dtype=torch.int32, device="cuda") for _ in range(layers)]
    tokens = torch.empty(shape, dtype=torch.int32, device="cuda")
    fill_random([tokens, *weights])
    learned = checksum(weights)

    def decode(batch: int) -> torch.Tensor:
        """Compute a stand-in for a model: each layer combines its input with its weights. Results are exact integers."""
        hidden = tokens[:batch]
        for weight in weights:
            hidden = hidden * weight[:batch] + 1
        return hidden

    expected = {batch: decode(batch).cpu() for batch in BATCHES}

    pool = torch.cuda.graph_pool_handle()
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
    for batch in BATCHES:
        graph = torch.cuda.CUDAGraph()
        with torch_memory_saver.cuda_graph(graph, pool=pool, tag="cuda_graph"):
            output = decode(batch)
        graphs[batch] = (graph, output)
    addresses = [output.data_ptr() for _, output in graphs.values()]
    torch.cuda.empty_cache()
    tags = torch_memory_saver.stats().tags
    check(tags["weights"].resident_bytes == total(weights), "the weights' memory is managed")
    held = tags["weights"].resident_bytes + tags["cuda_graph"].resident_bytes
    show(f"{len(graphs)} graphs over {layers} layers are captured")

    before = free_bytes()
    torch_memory_saver.pause(["weights", "cuda_graph"])
    show("paused")
    check_bytes(free_bytes() - before, held, "given back by weights and graphs")
    torch.full((held // 2,), 0xFF, dtype=torch.uint8, device="cuda")  # another tensor uses the memory
    torch.cuda.empty_cache()
    torch_memory_saver.resume(["cuda_graph", "weights"])
    show("resumed")

    check(checksum(weights) == learned, "the weights are what they were")
    check([output.data_ptr() for _, output in graphs.values()] == addresses, "the graphs' outputs are where they were")
    for batch, (graph, output) in graphs.items():
        graph.replay()
        check(torch.equal(output.cpu(), expected[batch]), f"the graph for batch {batch} gives what it gave, exactly")


if __name__ == "__main__":
    main()
