"""The HTML file of a report: template, styles, script, data and the charting library in one."""

import html
import json
import re
from collections.abc import Callable
from importlib import resources

from llamac.base.errors import requires
from llamac.report.plot import COLORS

_FILES = resources.files("llamac.report") / "page"


def library() -> str:
    """The JavaScript of plotly.js (MIT), which the package plotly carries."""
    return requires("plotly.offline", "a page").get_plotlyjs()


def _script_safe(text: str) -> str:
    """JSON that can stand in a <script> element: nothing in it ends the element or begins a comment."""
    escapes = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
    return re.sub("[<>&]", lambda m: escapes[m[0]], text)


def as_json(content: dict) -> str:
    """ASCII, so that any text of a log survives, also half of a surrogate pair."""
    return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def render(content: dict, follow: float | None = None) -> str:
    """The page. follow: seconds between its questions to the server that it came from for newer data; its
    library comes from there, too. None: everything is in the file, and it asks for nothing."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; "
    policy += "script-src 'unsafe-inline'" + ("" if follow is None else " 'self'; connect-src 'self'")
    script = f"<script>{library()}</script>" if follow is None else '<script src="plotly.min.js"></script>'
    title = ", ".join(run["label"] for run in content["runs"]).encode("utf-8", "replace").decode()
    parts: dict[str, Callable[[], str]] = {
        "POLICY": lambda: html.escape(policy, quote=True),
        "TITLE": lambda: html.escape(f"{title}: llamac"),
        "STYLE": lambda: _file("page.css"),
        "LIBRARY": lambda: script,
        "DATA": lambda: _script_safe(as_json(content | {"follow": follow, "colors": COLORS})),
        "SCRIPT": lambda: "\n".join(
            _file(name) for name in ("curves.js", "charts.js", "tables.js", "page.js")
        ),
    }
    return re.sub(r"@([A-Z]+)@", lambda m: parts[m[1]](), _file("page.html"))


def _file(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")
