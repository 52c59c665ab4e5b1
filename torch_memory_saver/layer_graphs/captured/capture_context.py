"""What surrounds every capture: errors are named, casts are not kept, and collecting garbage is cheap."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

import torch

from torch_memory_saver.errors import CaptureInProgressError, InvalidArgumentError, TorchMemorySaverError

__all__ = ["autocast_without_cache", "cheap_garbage_collection", "errors_named", "refuse_inside_capture"]


def refuse_inside_capture(owner: str) -> None:
    """
    Raises:
        CaptureInProgressError: The current stream is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise CaptureInProgressError(
            f"{owner}: the current stream is being captured, and a capture can neither contain another one nor a replay. "
            "End it first",
            operation="layer_graphs",
        )


@contextlib.contextmanager
def errors_named(owner: str, advice: str) -> Iterator[None]:
    """Around a capture.

    Args:
        owner: What is captured.
        advice: What to do if it waits for the GPU, which is why most captures fail.

    Raises:
        InvalidArgumentError: The capture failed; the message has what failed first. Errors of this package, and a lack of
            memory, are raised as they are.
    """
    outer = sys.exc_info()[1]
    try:
        yield
    except RuntimeError as error:
        first = _first(error, outer)
        if isinstance(first, (TorchMemorySaverError, torch.OutOfMemoryError)):
            raise first from None
        text = (str(first).splitlines() or [type(first).__name__])[0].rstrip(".")
        raise InvalidArgumentError(f"{owner} cannot be captured: {text}. {advice}") from error


def _first(error: BaseException, outer: BaseException | None) -> BaseException:
    """What failed first: the end of an invalidated capture fails, too. What was being handled before does not count."""
    while error.__context__ is not None and error.__context__ is not outer:
        error = error.__context__
    return error


@contextlib.contextmanager
def autocast_without_cache() -> Iterator[None]:
    """Casts of parameters are not kept from one graph to another."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextlib.contextmanager
def cheap_garbage_collection() -> Iterator[None]:
    """Collects garbage, such as graphs that are not used any more. Some releases of PyTorch do so before each capture: what
    exists before the first one is left out of that."""
    gc.collect()
    if gc.get_freeze_count():  # by the program, or by Python 3.12, which freezes objects of its own when it starts
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
