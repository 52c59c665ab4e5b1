"""The page of the timeline: one HTML file that needs no other file and no network.

document.py makes the data, and a text for readers without JavaScript. template.html is the page and style.css its looks.
columns.js finds what is shown at which column. pictures.js draws. views.js has the sections, zooming and the start. _html
has the parts that all pages share.
"""

from torch_memory_saver.observe.events.timeline.html.document import page

__all__ = ["page"]
