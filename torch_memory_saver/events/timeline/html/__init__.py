"""The page of the timeline: one HTML file that needs no other file and no network.

document.py makes its data, and its text for readers without JavaScript. template.html is the page, style.css its looks,
columns.js what is shown at which column, pictures.js the drawing, and views.js the sections, zooming and the start; _html
has what all pages share.
"""

from torch_memory_saver.events.timeline.html.document import page

__all__ = ["page"]
