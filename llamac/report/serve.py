"""`--serve`: the report of live runs on 127.0.0.1. The page asks for the data again and keeps its zoom."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

from llamac.base.errors import InputError
from llamac.report import content, page
from llamac.report.log import RunLog

EVERY = 5.0  # seconds between two questions of the page


class Live:
    """The newest content of runs; one thread at a time reads their logs."""

    def __init__(self, runs: dict[str, RunLog]):
        self.runs = runs
        self.lock = threading.Lock()
        self.version = 0
        self.content = content.report(runs)

    def update(self) -> tuple[int, dict]:
        """A number that changes with the content, and the content."""
        with self.lock:
            try:
                changed = [log.update() for log in self.runs.values()]
            except InputError as error:  # the run is being replaced, or its log is damaged
                return self.version, self.content | {"problem": str(error)}
            if any(changed):
                self.version += 1
                self.content = content.report(self.runs)
            return self.version, self.content


class _Handler(BaseHTTPRequestHandler):
    live: ClassVar[Live]
    library: ClassVar[bytes]

    def do_GET(self) -> None:
        # A page of another site that resolves its name to this machine does not get the data.
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in ("127.0.0.1", "localhost"):
            self.send_error(403, "expected 127.0.0.1 or localhost as the host")
        elif self.path == "/":
            _, found = self.live.update()
            self._send(page.render(found, follow=EVERY).encode(), "text/html; charset=utf-8")
        elif self.path == "/plotly.min.js":
            self._send(self.library, "text/javascript; charset=utf-8", cached=True)
        elif self.path == "/data.json":
            version, found = self.live.update()
            tag = f'"{version}{"p" if "problem" in found else ""}"'
            if self.headers.get("If-None-Match") == tag:
                self.send_response(304)
                self.send_header("ETag", tag)
                self.end_headers()
                return
            self._send(page.as_json(found).encode(), "application/json", tag=tag)
        elif self.path == "/favicon.ico":
            self.send_response(204)
            self.end_headers()
        else:
            self.send_error(404)

    def _send(self, body: bytes, kind: str, *, cached: bool = False, tag: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "max-age=86400" if cached else "no-cache")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args) -> None:
        """No line per request."""


def server(runs: dict[str, RunLog], port: int) -> ThreadingHTTPServer:
    """Bound, not yet serving. Raises InputError if the port is taken or plotly is missing."""
    handler = type("Handler", (_Handler,), {"live": Live(runs), "library": page.library().encode()})
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        raise InputError(
            f"--serve {port}: cannot bind 127.0.0.1: {error.strerror}; take another port"
        ) from None


def serve(runs: dict[str, RunLog], port: int) -> None:
    with server(runs, port) as running:
        print(f"http://127.0.0.1:{running.server_address[1]}/ (Ctrl-C ends it)", flush=True)
        try:
            running.serve_forever()
        except KeyboardInterrupt:
            print()
