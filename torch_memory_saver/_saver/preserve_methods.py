"""The part of the public class that preserves blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from torch_memory_saver._saver.arguments import check_flag, check_tag
from torch_memory_saver._saver.first_use import UsedAtFirstCall
from torch_memory_saver._torch.eager import eager_methods
from torch_memory_saver.usage import PreservedBlock

if TYPE_CHECKING:
    import torch

    Preservable: TypeAlias = torch.Tensor | torch.nn.Module | Iterable[Any]

__all__ = ["PreserveMethods"]


@eager_methods
class PreserveMethods(UsedAtFirstCall):
    """preserve(), forget() and preserved()."""

    def preserve(self, *what: Preservable, tag: str | None = None, parameters: bool = False) -> tuple[PreservedBlock, ...]:
        """Keep the contents of tensors through pauses that drop those of the memory around them.

        For what an engine computes once and never again, in memory without a backup: rope tables, scales, running
        statistics. A pause copies these storages to pinned host memory, and nothing else of that memory. The resume restores
        them; the rest comes back with undefined contents. ``pause(backup="discard")`` drops all of it, and ``"host"`` and
        ``"disk"`` keep all of it. In memory with a backup, and in memory that is not managed, nothing changes.

        Args:
            what: Tensors, modules, or iterables of them, such as ``state_dict().values()``. A tensor stands for its whole
                storage, so a view, ``p.data`` or ``p.detach()`` will do. A module stands for all buffers that it has at the
                pause, also of its submodules. Storages and modules are held weakly: a registration ends when its storage is
                freed. A tensor that gets another storage later (``p.data = ...``) has to be passed again.
            tag: Only storages in memory of this tag. None: in memory of any tag.
            parameters: The parameters of modules as well.

        Returns:
            What a pause would keep of `what` now. A warning is logged for tensors that are not in managed memory.

        Raises:
            InvalidArgumentError: Something else than tensors and modules; an invalid tag; `parameters` that is not a flag.
        """
        blocks: tuple[PreservedBlock, ...] = self._use().preserve(
            what, tag=None if tag is None else check_tag(tag), parameters=check_flag("parameters", parameters)
        )
        return blocks

    def forget(self, *what: Preservable) -> None:
        """Undo :meth:`preserve` for the storages of tensors, and for modules. Objects that are not registered are ignored.

        Raises:
            InvalidArgumentError: Something else than tensors and modules.
        """
        self._use().forget(what)

    def preserved(self, tag: str | Iterable[str] | None = None) -> tuple[PreservedBlock, ...]:
        """What a pause of a tag would keep now because of :meth:`preserve`, by address.

        Args:
            tag: A tag or a pattern, several, or None for every tag.

        Raises:
            InvalidArgumentError: Neither a tag nor an iterable of tags.
        """
        blocks: tuple[PreservedBlock, ...] = self._use().preserved(tag)
        return blocks
