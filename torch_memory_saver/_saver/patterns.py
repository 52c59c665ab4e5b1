"""Patterns of tags, as in ``pause("engine0/*")``: those of the shell, with upper and lower case told apart.

Every call that selects memory by tags takes them: pause, resume, stats, preserved, check_fresh and the hooks. A region takes
names only, and any name. A tag that looks like a pattern is meant by that name, as soon as a region or an allocation has had
it.

A pattern stands for the tags that allocations have had when the call begins. It is replaced by them once, before anything
else looks at the selection, so that all parts of a call select the same memory. A tag that appears afterwards is not
selected, as an allocation that appears during a pause by name is not.

Any thread; no lock. A selection of names only is not looked up at all.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch_memory_saver import _core
from torch_memory_saver._saver.arguments import check_tags

__all__ = ["select_tags"]

_WILDCARDS = frozenset("*?[")


def select_tags(tags: object) -> tuple[str, ...] | None:
    """The names of the tags that a call selects, each once, in order; None is every tag. A pattern that no tag matches
    stays as it is: the core warns of it as of an unknown tag.

    Raises:
        InvalidArgumentError: Neither a tag nor an iterable of tags.
    """
    selected = check_tags(tags)
    if selected is None or all(_WILDCARDS.isdisjoint(tag) for tag in selected):
        return selected
    known = _core.tags()
    used = [tag for tag, is_used in known.items() if is_used]
    names: dict[str, None] = {}
    for tag in selected:
        is_pattern = not _WILDCARDS.isdisjoint(tag) and tag not in known
        matches = [name for name in used if fnmatchcase(name, tag)] if is_pattern else []
        names.update(dict.fromkeys(matches or [tag]))
    return tuple(names)
