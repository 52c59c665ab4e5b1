"""Assemble a page: a template, scripts and styles, data, and a policy that lets only these run."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

__all__ = ["Document", "resource"]

#: In front of the scripts and styles of every page.
_SHARED_SCRIPT, _SHARED_STYLE = "elements.js", "theme.css"


def resource(package: str, name: str) -> str:
    """Return the text of a file that lies in a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Document:
    """A kind of page.

    Attributes:
        package: The package that has the files of the page.
        template: The name of the HTML file, in which ``{{NAME}}`` stands for a part: POLICY, STYLE, SCRIPT, DATA, or a text.
        scripts: Names of the scripts. The shared script and these are joined, in this order.
        styles: Names of the style sheets, which are joined in the same way.
    """

    package: str
    template: str
    scripts: tuple[str, ...]
    styles: tuple[str, ...]

    def page(self, data: object, texts: Mapping[str, str]) -> str:
        """Return the page.

        Args:
            data: The object that the script of the page reads, as JSON, from the element ``data``.
            texts: Plain texts for the template, by their names in it.
        """
        script = self._joined(_SHARED_SCRIPT, self.scripts)
        style = self._joined(_SHARED_STYLE, self.styles)
        encoded = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
        parts = {
            **{name: html.escape(text) for name, text in texts.items()},
            "POLICY": f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}",
            "STYLE": style,
            "SCRIPT": script,
            # "</script>" in a text must not end the element.
            "DATA": encoded.replace("<", "\\u003c"),
        }
        before, *pieces = resource(self.package, self.template).split("{{")
        return before + "".join(parts[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces))

    def _joined(self, shared: str, own: tuple[str, ...]) -> str:
        return resource(__package__, shared) + "".join(resource(self.package, name) for name in own)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
