"""The comparison as one HTML page that needs no other file and no network.

template.html is the page, style.css its looks, tables.js and pictures.js its script; _html has what all pages share. The
data is JSON: pictures.py has what is drawn, with the call stacks, and document.py the rest.
Everything is folded to a bounded size, and the page states what was folded.
"""

from .document import page

__all__ = ["page"]
