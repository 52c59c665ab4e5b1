"""Selections of tags: those that a pause or resume concerns."""

from __future__ import annotations

__all__ = ["Tags", "selects"]

#: A selection of tags: None is every tag.
Tags = tuple[str, ...] | None


def selects(tags: Tags, tag: str) -> bool:
    """Return whether a pause or resume of `tags` selects `tag`."""
    return tags is None or tag in tags
