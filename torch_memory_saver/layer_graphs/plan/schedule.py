"""The order in which one rank of a pipeline runs its forwards and backwards: 1F1B, plain and interleaved.

Source: Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, arXiv
2104.04473, section 2.2. Groups need not have the size of the pipeline, as with Megatron Core's setting
``microbatch_group_size_per_vp_stage``.

A rank runs some forwards first (*warm-up*), so that the ranks after it have work. Then it runs a forward and a backward in
turn (*steady state*), then the backwards that remain (*cool-down*). With several chunks, it runs a *group* of micro-batches
in chunk 0, then the same group in chunk 1, and so on, then the next group; backwards begin with the last chunk.
"""

from __future__ import annotations

from torch_memory_saver.errors import InvalidArgumentError

from .timeline import Bubble, run_orders

__all__ = ["bubble_fraction", "pipeline_order", "schedule_table", "warmup_count"]


def warmup_count(pp: int, rank: int, vpp: int = 1, group: int | None = None) -> int:
    """Return how many forwards a rank runs before its first steady pair of a forward and a backward.

    The count holds if there are enough micro-batches.

    It is ``pp - rank - 1`` for one chunk a rank, and ``(pp - rank - 1) * 2 + (vpp - 1) * group`` for several. The first
    backward is that of the last chunk, whose first forward comes after `vpp` - 1 whole groups. Two forwards for each later
    rank keep the rank busy while activations go to the last rank and gradients come back. Without a pipeline it is 0.

    Args:
        pp: The number of ranks of the pipeline.
        rank: The rank in the pipeline.
        vpp: The chunks of each rank.
        group: The micro-batches that run in one chunk before the next chunk. None means `pp`. It has no effect if `vpp` is
            1.

    Raises:
        InvalidArgumentError: An argument is no int or out of its range.
    """
    pp, vpp, group = _checked(pp, vpp, group)
    if type(rank) is not int or not 0 <= rank < pp:
        raise InvalidArgumentError(f"rank is {rank!r}: it must be an int from 0 to {pp - 1}")
    after = pp - rank - 1
    return after if vpp == 1 else after * 2 + (vpp - 1) * group


def schedule_table(microbatches: int, chunks: int, group: int) -> tuple[tuple[int, int], ...]:
    """Return the forwards of a step as pairs of micro-batch and chunk, in the order in which a rank runs them.

    The backwards follow the same table, with the chunks counted from the last.

    The last group is smaller if the number of micro-batches is not divisible by `group`.

    Args:
        microbatches: The micro-batches of a step.
        chunks: The chunks of the rank.
        group: The micro-batches that run in one chunk before the next chunk.

    Raises:
        InvalidArgumentError: An argument is no int above 0.
    """
    for name, value in (("microbatches", microbatches), ("chunks", chunks), ("group", group)):
        _check_count(name, value)
    return tuple(
        (microbatch, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group, microbatches))
    )


def pipeline_order(pp: int, rank: int, microbatches: int, vpp: int = 1, group: int | None = None) -> tuple[int, ...]:
    """Return the order of a rank in a step: chunk number + 1 for a forward, its negative for a backward.

    Without a pipeline it is 1, -1, 1, -1, and so on.

    With several chunks a rank, the schedule is meant for groups of `pp` micro-batches or more, the last group included.
    Megatron Core refuses other groups. They are allowed here if the ranks do not wait for each other for ever. Their bubble
    is larger (`bubble_fraction`).

    Args:
        pp: The number of ranks of the pipeline.
        rank: The rank in the pipeline.
        microbatches: The micro-batches of a step.
        vpp: The chunks of each rank.
        group: The micro-batches that run in one chunk before the next chunk. None means `pp`. It has no effect if `vpp` is
            1.

    Raises:
        InvalidArgumentError: An argument is no int or out of its range, or the ranks would wait for each other for ever.
    """
    warmup = warmup_count(pp, rank, vpp, group)
    pp, vpp, group = _checked(pp, vpp, group)
    _check_count("microbatches", microbatches)
    if not _is_regular(pp, microbatches, vpp, group):
        run_orders(_all_orders(pp, microbatches, vpp, group))
    return _order(microbatches, vpp, group, warmup)


def bubble_fraction(
    pp: int, microbatches: int, vpp: int = 1, group: int | None = None, *, forward: float = 1, backward: float = 2
) -> Bubble:
    """Return how long each rank waits in a step.

    The wait is given as a fraction of the ideal time, in which only the work is done, and as a fraction of the step.

    The fractions are ``(pp - 1) / (vpp * microbatches)`` and ``(pp - 1) / (vpp * microbatches + pp - 1)``, whatever the
    durations, if `vpp` is 1, or if `group` and the last group are of `pp` micro-batches or more each. So a number of
    micro-batches that is not divisible by `group` costs nothing if the remainder is `pp` or more. A smaller remainder or
    group costs more, because a chunk is due before the last rank has run the one before it. Then the fractions are measured
    on a timeline with the two durations.

    Args:
        pp: The number of ranks of the pipeline.
        microbatches: The micro-batches of a step.
        vpp: The chunks of each rank.
        group: The micro-batches that run in one chunk before the next chunk. None means `pp`. It has no effect if `vpp` is
            1.
        forward: How long a forward of one chunk takes, in any unit.
        backward: How long a backward of one chunk takes, in the same unit.

    Raises:
        InvalidArgumentError: An argument is out of its range, or the ranks would wait for each other for ever.
    """
    pp, vpp, group = _checked(pp, vpp, group)
    _check_count("microbatches", microbatches)
    if not (forward > 0 and backward > 0):
        raise InvalidArgumentError(f"the durations are {forward} and {backward}: both must be above 0")
    if not _is_regular(pp, microbatches, vpp, group):
        return run_orders(_all_orders(pp, microbatches, vpp, group), forward, backward).bubble
    work = vpp * microbatches
    return Bubble((pp - 1) / work, (pp - 1) / (work + pp - 1))


def _order(microbatches: int, chunks: int, group: int, warmup: int) -> tuple[int, ...]:
    table = schedule_table(microbatches, chunks, group)
    forwards = [chunk + 1 for _, chunk in table]
    backwards = [chunk - chunks for _, chunk in table]
    first = min(warmup, len(table))
    steady = [entry for pair in zip(forwards[first:], backwards, strict=False) for entry in pair]
    return (*forwards[:first], *steady, *backwards[len(table) - first :])


def _all_orders(pp: int, microbatches: int, vpp: int, group: int) -> list[tuple[int, ...]]:
    return [_order(microbatches, vpp, group, warmup_count(pp, rank, vpp, group)) for rank in range(pp)]


def _is_regular(pp: int, microbatches: int, vpp: int, group: int) -> bool:
    """Return whether the schedule is regular, so that `bubble_fraction` can compute the bubble by its formula.

    The schedule is regular if the last rank has run a group's first micro-batch in one chunk when rank 0 needs it for the
    next chunk.
    """
    last = microbatches % group
    return vpp == 1 or (group >= pp and (last == 0 or last >= pp))


def _checked(pp: int, vpp: int, group: int | None) -> tuple[int, int, int]:
    group = pp if group is None else group
    for name, value in (("pp", pp), ("vpp", vpp), ("group", group)):
        _check_count(name, value)
    return pp, vpp, group


def _check_count(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise InvalidArgumentError(f"{name} is {value!r}: it must be an int above 0")
