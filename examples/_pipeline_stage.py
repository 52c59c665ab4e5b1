"""A rank of the pipeline of partial_cuda_graph.py: chunks of layers, run in an order, and what they send to other ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from _moe_transformer import loss_of

Batch = tuple[torch.Tensor, torch.Tensor]


class Sends(Protocol):
    """Brings tensors from stage to stage. A *stage* is a chunk of the whole pipeline: its rank is stage % ranks."""

    def send(self, tensor: torch.Tensor, stage: int, to: int) -> Any:
        """Begins to send, and returns what has a wait()."""

    def receive(self, stage: int, to: int) -> torch.Tensor:
        """What `stage` has sent to the stage `to`."""


class Links:
    """Sends by NCCL. Each pair of ranks has a communicator for each direction, and for activations and gradients: so a send
    never waits for one that the other rank will receive later."""

    def __init__(self, ranks: int, shape: Sequence[int]) -> None:
        self.ranks = ranks
        self.shape = tuple(shape)
        neighbours = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
        ways = [(*pair, True) for pair in neighbours] + [(*reversed(pair), False) for pair in neighbours]
        self.groups = {way: dist.new_group(way[:2]) for way in ways}  # all ranks make all groups, in the same order
        for (source, target, _), group in self.groups.items():  # NCCL connects at the first message
            message = torch.zeros(1, device="cuda")
            if dist.get_rank() == source:
                dist.send(message, target, group=group)
            elif dist.get_rank() == target:
                dist.recv(message, source, group=group)

    def way(self, stage: int, to: int) -> tuple[int, int, bool]:
        return stage % self.ranks, to % self.ranks, to > stage

    def send(self, tensor: torch.Tensor, stage: int, to: int) -> Any:
        way = self.way(stage, to)
        return dist.isend(tensor, way[1], group=self.groups[way])

    def receive(self, stage: int, to: int) -> torch.Tensor:
        way = self.way(stage, to)
        arrived = torch.empty(self.shape, device="cuda")
        dist.recv(arrived, way[0], group=self.groups[way])
        return arrived


class Received(torch.autograd.Function):
    """What a stage receives, as an operation of autograd: its backward sends the gradient to where the tensor came from. No
    leaf is between, which would keep a copy of the gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, receive: Callable[[], torch.Tensor], send: Callable[..., None]) -> Any:
        """`anchor` is there because autograd runs the backward only if an input has a gradient."""
        ctx.send = send
        return receive()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.send(gradient)
        return None, None, None


class Stage:
    """Runs the chunks of a rank. Without graphs it does the same."""

    def __init__(
        self, chunks: Sequence[Sequence[Any]], order: Sequence[int], rank: int, ranks: int, links: Sends, graphs: Any = None
    ) -> None:
        """
        Args:
            chunks: Modules or captured layers.
            order: What the rank runs in a step.
            rank: The number of the rank, and...
            ranks: ...how many there are.
            links: To the other ranks.
            graphs: The LayerGraphs of captured layers.
        """
        self.chunks, self.order, self.rank, self.ranks, self.links, self.graphs = chunks, order, rank, ranks, links, graphs
        self.last_stage = len(chunks) * ranks - 1
        self.anchor = torch.zeros((), device="cuda", requires_grad=True)

    def step(self, batches: Sequence[Batch]) -> list[float]:
        """Runs all micro-batches forwards and backwards. The losses, on the rank that has the last stage."""
        self.sends: list[tuple[Any, torch.Tensor]] = []
        self.losses: list[torch.Tensor] = []
        waiting = [deque[tuple[torch.Tensor, int]]() for _ in self.chunks]
        microbatches = [iter(batches) for _ in self.chunks]
        for entry in self.order:
            chunk = abs(entry) - 1
            stage = chunk * self.ranks + self.rank
            if entry > 0:
                waiting[chunk].append((self.forward(chunk, stage, *next(microbatches[chunk])), stage))
            else:
                self.backward(*waiting[chunk].popleft())
        for work, _ in self.sends:
            work.wait()
        return [loss.item() for loss in self.losses]

    def forward(self, chunk: int, stage: int, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if stage > 0:
            hidden = Received.apply(
                self.anchor,
                lambda: self.links.receive(stage - 1, stage),
                lambda gradient: self.send_gradient(gradient, stage),
            )
        for layer in self.chunks[chunk]:
            hidden = layer(hidden)
        if stage == self.last_stage:
            loss = loss_of(hidden, wanted)
            self.losses.append(loss.detach())
            return loss
        sent = hidden.detach()  # ordinary memory: the layer's last operations are not in its graph
        self.sends.append((self.links.send(sent, stage, stage + 1), sent))
        return hidden

    def backward(self, result: torch.Tensor, stage: int) -> None:
        if stage == self.last_stage:
            result.backward()
        else:
            torch.autograd.backward(result, self.links.receive(stage + 1, stage))

    def send_gradient(self, gradient: torch.Tensor, stage: int) -> None:
        """The gradient of a captured layer's input lies in the graphs' memory, which a later backward uses again."""
        work = self.links.send(gradient, stage, stage - 1)
        if self.graphs is not None:
            self.graphs.in_flight(gradient, work)
        self.sends.append((work, gradient))
