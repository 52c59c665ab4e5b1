"""A rank of the pipeline of partial_cuda_graph.py: it runs chunks of layers in an order and sends results to others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from _moe_transformer import loss_of

Batch = tuple[torch.Tensor, torch.Tensor]


class Sends(Protocol):
    """A transport of tensors between stages. A *stage* is a chunk of the whole pipeline: its rank is stage % ranks."""

    def send(self, tensor: torch.Tensor, stage: int, to: int) -> Any:
        """Begin to send, and return an object with a wait() method."""

    def receive(self, stage: int, to: int) -> torch.Tensor:
        """Return the tensor that `stage` has sent to the stage `to`."""


class Links:
    """A transport over NCCL. Each pair of ranks has a communicator for each direction, and for activations and gradients. So
    a send never waits for one that the other rank will receive later."""

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
    """A receive as an autograd operation, whose backward returns the gradient to the sender of the tensor. The result is not
    a leaf, because a leaf would keep a copy of the gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, receive: Callable[[], torch.Tensor], send: Callable[..., None]) -> Any:
        """Receive the tensor. `anchor` exists because autograd runs the backward only if an input requires a gradient."""
        ctx.send = send
        return receive()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.send(gradient)
        return None, None, None


class Stage:
    """The chunks of a rank, with or without graphs."""

    def __init__(
        self, chunks: Sequence[Sequence[Any]], order: Sequence[int], rank: int, ranks: int, links: Any, graphs: Any = None
    ) -> None:
        """
        Args:
            chunks: Modules or captured layers.
            order: The order in which the rank runs its chunks in a step.
            rank: The number of this rank.
            ranks: The number of ranks.
            links: The transport to the other ranks (`Sends`), or None if there are no others.
            graphs: The LayerGraphs of captured layers.
        """
        self.chunks, self.order, self.rank, self.ranks, self.links, self.graphs = chunks, order, rank, ranks, links, graphs
        self.last_stage = len(chunks) * ranks - 1
        self.anchor = torch.zeros((), device="cuda", requires_grad=True)

    def step(self, batches: Sequence[Batch]) -> list[float]:
        """Run all micro-batches forwards and backwards. Returns the losses on the rank that has the last stage."""
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
        """Send the gradient of a captured layer's input. It lies in graph memory, which a later backward uses again."""
        work = self.links.send(gradient, stage, stage - 1)
        if self.graphs is not None:
            self.graphs.in_flight(gradient, work)
        self.sends.append((work, gradient))
