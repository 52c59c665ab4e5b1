"""Weights that outlive their process: published in the shared store, and adopted by a process that starts later.

    from torch_memory_saver import node_store

    key = node_store.identity_of(weight_files, rank=rank, world_size=world_size, dtype="bfloat16")
    node_store.adopt_or_load("qwen-32b/rank0", model, lambda: load(model), identity=key)

Published weights are objects of the store that ``backup="shared"`` uses (``docs/architecture-shared-store.md``), to which no
process has to hold on. What the store has already is not copied, and a pause with ``backup="shared"`` copies nothing of what
was published or adopted.

Importing this package does not import torch.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._published import file_name, published_names, read_manifest, remove_published
from torch_memory_saver._services import layer, log_info
from torch_memory_saver._shared_folder import store_path
from torch_memory_saver._text import binary_size, counted, described, duration, printable, reason_of
from torch_memory_saver.errors import (
    BackupIOError,
    DeviceLostError,
    DriverError,
    InvalidArgumentError,
    InvalidStateError,
    OutOfHostMemoryError,
    OutOfMemoryError,
)

from . import contents, manifest
from .identity import identity_of
from .loading import changed, describe
from .pieces import plan
from .tensors import Found, find

__all__ = ["Adoption", "adopt", "adopt_or_load", "identity_of", "names", "publish", "remove"]

logger = logging.getLogger("torch_memory_saver")


@dataclasses.dataclass(frozen=True)
class Adoption:
    """The result of :func:`adopt`, which is true if the tensors have been filled.

    Attributes:
        adopted: Whether the tensors have been filled.
        bytes: Number of bytes that they have got.
        extra: Value that the publisher has given; None if nothing was adopted.
        reason: Sentence that says why nothing was adopted; "" after a success.
    """

    adopted: bool
    bytes: int = 0
    extra: Any = None
    reason: str = ""
    #: What is published differs or is damaged, so that each such call would fail.
    _useless: bool = dataclasses.field(default=False, repr=False)

    def __bool__(self) -> bool:
        return self.adopted

    def __str__(self) -> str:
        return f"adopted {binary_size(self.bytes)}" if self.adopted else f"adopted nothing: {self.reason}"


def publish(name: str, model: Any, *, identity: str, extra: Any = None) -> None:
    """Publish the parameters and buffers of a module, so that later processes can adopt them.

    The tensors are on the GPU, and nothing changes them during the call. Each storage is published as a whole. The call
    waits for the devices, computes fingerprints on them, and writes only what the store does not have. If the name exists
    already, it has the new weights afterwards; a process that dies then leaves the old ones, the new ones, or none.

    The weights need host memory of their size until :func:`remove` is called, because no process owns them: the OOM killer
    does not free them. A cgroup in which they were written is charged for them.

    With ``TMS_DISABLE=1`` only the arguments are checked.

    Args:
        name: Name of the weights, which is the same for each process that may adopt them: the model and the rank. It may
            have any characters.
        model: A module, or a mapping from names to tensors.
        identity: Text that says from what the weights were made. Only a process with the same one adopts them.
        extra: A small JSON value for the adopter, such as scales that live in Python and not in a tensor.

    Raises:
        InvalidArgumentError: The name, the identity or `extra` cannot be used, there is no tensor, or a tensor cannot be
            published: it is on the CPU, on the meta device, or of a subclass such as DTensor.
        InvalidStateError: A tensor is paused.
        OutOfHostMemoryError: The host or the cgroup has too little memory. Nothing was written.
        BackupIOError: The folder of the store is refused, is full, or cannot be written.
        DriverError: The fingerprints could not be computed, or a copy failed.
    """
    encoded, began = _checked(name, identity, "publish"), time.monotonic()
    if _core.get_disabled():
        return
    torch = layer.require_module()
    found = find(torch, model, "publish")
    if not found.tensors:
        raise InvalidArgumentError("publish: the model has no parameters and no buffers", operation="publish")
    text = manifest.contents_of(identity, found, extra)
    written = contents.publish(torch, found, plan(found.shapes), encoded, text)
    size, seconds = binary_size(sum(shape.bytes for shape in found.shapes)), duration(time.monotonic() - began)
    tensors, new = counted(len(found.tensors), "tensor"), binary_size(written)
    log_info(f"published '{printable(name)}': {size} in {tensors}, {new} of objects written, in {seconds}")


def adopt(name: str, model: Any, *, identity: str) -> Adoption:
    """Fill the parameters and buffers of a module with published ones, if they are there and fit.

    The identity, and the names, types, shapes, strides and ties of the tensors, are compared before anything is written. On
    a difference the log has one warning that names it. Each object is then copied to scratch memory on the GPU, at most
    1 GiB at a time, and its contents are compared with its name before a byte of it reaches a tensor. If an object is
    damaged, the result is false as well; some tensors have been filled then. So after a result that is false, load the
    weights: that sets everything.

    Values that live in Python are not restored, such as scales that are attributes, or the state of a quantisation method.
    Publish them as `extra`. Nothing else of a module changes: parameters keep their addresses.

    A pause of the tensors with ``backup="shared"`` copies nothing of them afterwards, except for small ones.

    Args:
        name: Name of the weights.
        model: A module, or a mapping from names to tensors, as for :func:`publish`.
        identity: Text that says from what the weights must have been made.

    Returns:
        A result that is true if all tensors have been filled. It has the publisher's `extra`. With ``TMS_DISABLE=1`` it is
        always false.

    Raises:
        InvalidArgumentError: The name or the identity cannot be used, or a tensor could not have been published.
        InvalidStateError: A tensor is paused.
    """
    _checked(name, identity, "adopt")
    began = time.monotonic()
    if _core.get_disabled():
        return Adoption(False, reason="TMS_DISABLE is set")
    torch = layer.require_module()
    found = find(torch, model, "adopt")
    try:
        text = read_manifest(store_path(), name)
        if text is None:
            log_info(f"nothing is published as '{printable(name)}'")
            return Adoption(False, reason="nothing is published under this name")
        kept = manifest.read(text)
        reason = kept.difference(identity, found) or _fill(torch, found, kept)
        useless = bool(reason)
    except manifest.ManifestError as error:
        reason, useless = str(error), True
    except DeviceLostError:
        raise
    except (OSError, DriverError, OutOfMemoryError, OutOfHostMemoryError, torch.cuda.OutOfMemoryError) as error:
        useless = isinstance(error, BackupIOError) and not error.os_error  # no call has failed: the core has found damage
        reason = f"{reason_of(error)}{_tensor_of(error, found)}"
    if reason:
        logger.warning("'%s' is not adopted: %s", name, reason)
        return Adoption(False, reason=reason, _useless=useless)
    adoption = Adoption(True, sum(shape.bytes for shape in found.shapes), kept.extra)
    log_info(f"{adoption} of '{printable(name)}' in {duration(time.monotonic() - began)}")
    return adoption


def adopt_or_load(name: str, model: Any, load: Callable[[], object], *, identity: str) -> bool:
    """Adopt the weights of a module, or load them and publish them.

    Nothing that goes wrong in the store keeps the weights from being loaded: it is one warning. Weights are published only
    if an adopter would have everything that the load has set. Otherwise a warning names what the load has changed, and
    nothing is published. These are compared before and after the load: names, dtypes, shapes, strides, storages and ties of
    tensors; their `requires_grad`, attributes and hooks; which objects the parameters and submodules are; classes,
    attributes and hooks of modules. Changes inside other objects are not noticed. So call `eval()` and `requires_grad_()`
    afterwards, and convert the dtype afterwards.

    Weights of this name that differ or are damaged are removed before the load. So their memory is free for the new ones,
    and damaged objects are written again. If they cannot be adopted for another reason, such as too little memory on the
    GPU, they stay until new ones are published.

    Call the function before anything converts the weights, such as the repacking of a quantisation method. A process that
    adopts them then converts them as a process that loads them does, and gets what conversion sets in Python.

    With ``TMS_DISABLE=1`` the weights are loaded, and nothing else happens.

    Args:
        name: Name of the weights.
        model: The module.
        load: Function that loads the weights into the module. It is called at most once, and sets every tensor that the
            construction of the module has not set.
        identity: Text that says from what the weights are made.

    Returns:
        Whether the weights were adopted.

    Raises:
        InvalidArgumentError: The name, the model, the identity or `load` cannot be used.
        InvalidStateError: A tensor is paused. Nothing was loaded.
        Exception: Whatever `load` raises.
    """
    _checked(name, identity, "adopt_or_load")
    if not callable(load):
        raise InvalidArgumentError(
            f"adopt_or_load: load must be a function, not {described(load)}", operation="adopt_or_load"
        )
    if not callable(getattr(model, "named_modules", None)):
        raise InvalidArgumentError(
            f"adopt_or_load: model must be a module, not {type(model).__name__}. Use adopt() and publish() for a mapping",
            operation="adopt_or_load",
        )
    if _core.get_disabled():
        load()
        return False
    before = None
    try:
        torch = layer.require_module()
        before = describe(torch, model, "adopt_or_load")
        published_names(store_path())  # raises if the folder is refused, so that adopt and remove do not both warn of it
        adoption = adopt(name, model, identity=identity)
        if adoption:
            return True
        if adoption._useless:
            remove(name)
    except InvalidStateError:  # a load would write to paused memory
        raise
    except Exception as error:
        logger.warning("'%s' is loaded and not published: %s", name, reason_of(error))
        before = None
    load()
    if before is None:
        return False
    try:
        change = changed(before, describe(torch, model, "adopt_or_load"))
        if change:
            logger.warning("'%s' is not published: loading has %s", name, change)
        else:
            publish(name, model, identity=identity)
    except Exception as error:
        logger.warning("'%s' is not published: %s", name, reason_of(error))
    return False


def _fill(torch: Any, found: Any, kept: manifest.Manifest) -> str:
    """Fill the tensors. Return why that is not possible, or ""."""
    missing = contents.fill(torch, found, kept.plan(), kept.objects)
    return "" if missing is None else f"its object '{kept.objects[missing]}' is missing"


def _tensor_of(error: Exception, found: Found) -> str:
    """Return a sentence that names the tensor at the address of an error, or "" if there is none."""
    address = getattr(error, "address", 0)
    for name, tensor in found.tensors.items():
        start = found.storages[tensor.storage].data_ptr()
        if start <= address < start + found.shapes[tensor.storage].bytes:
            return f" The address is in '{name}'."
    return ""


def names() -> list[str]:
    """Return the names that are published on this machine for this user, sorted.

    Raises:
        BackupIOError: The folder of the store is refused or cannot be read.
    """
    try:
        return published_names(store_path())
    except OSError as error:
        raise _failure(error, "names") from error


def remove(name: str) -> bool:
    """Remove a published name, and release the memory of the weights that no other name and no process uses.

    Args:
        name: Name of the weights.

    Returns:
        Whether there was such a name.

    Raises:
        InvalidArgumentError: The name cannot be one.
        BackupIOError: The folder of the store is refused, or something could not be removed.
    """
    file_name(name, "remove")
    try:
        return remove_published(store_path(), name)
    except OSError as error:
        raise _failure(error, "remove") from error


def _checked(name: str, identity: str, operation: str) -> str:
    """Return the file name of a name."""
    if not isinstance(identity, str) or not identity:
        raise InvalidArgumentError(
            f"{operation}: identity must be a str that is not empty, not {described(identity)}", operation=operation
        )
    return file_name(name, operation)


def _failure(error: OSError, operation: str) -> BackupIOError:
    if isinstance(error, BackupIOError):
        return error
    return BackupIOError(f"{operation}: {reason_of(error)}", operation=operation, os_error=error.errno or 0)
