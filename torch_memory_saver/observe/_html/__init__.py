"""The common parts of the package's HTML pages. Each page is one file that needs no other file and no network.

document.py puts a page together. theme.css has the colours, light and dark, and the elements that all pages have.
elements.js has the functions with which a script makes elements and draws. Data is JSON inside the page. Text of it never
becomes markup: scripts set it as text, and the policy of a page forbids every script and style but its own.

Imports no torch and nothing else of the package.
"""

from torch_memory_saver.observe._html.document import Document, resource

__all__ = ["Document", "resource"]
