"""Keeps the collection of garbage between tests short, for the tests of every folder."""

from __future__ import annotations

import gc

#: A collection of so many objects takes milliseconds, one of eight times as many a tenth of a second on a busy core.
MANY_OBJECTS = 20_000


def set_survivors_aside() -> None:
    """Has later collections pass over the objects that exist now, where these are many. To be called between tests, right
    after a collection: what exists then belongs to modules and to the session, and stays."""
    if len(gc.get_objects()) > MANY_OBJECTS:
        gc.freeze()
