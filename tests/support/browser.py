"""Checks the site's layout in headless Chromium, by the script ``layout_check.js``."""

import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("layout_check.js")
#: Names of the program: Debian's, Ubuntu's, and Google's build, which CI runners have.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """The path of Chromium or Chrome, or None if neither is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def check_site(
    browser: str, site: Path, pages: Sequence[str], widths: Sequence[int], query: str, profile: Path
) -> dict[str, Any]:
    """Open pages of a built site and return ``problems`` and the ``firstHit`` of a search.

    Args:
        pages: paths from the site's root.
        widths: widths of the window in CSS pixels.
        query: text to search for.
        profile: an empty folder for the browser's files.
    """
    values = {"PAGES": [f"/{page}" for page in pages], "WIDTHS": list(widths), "QUERY": query}
    script = SCRIPT.read_text()
    constants = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items())
    reports: queue.Queue[dict[str, Any]] = queue.Queue()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/check":
                return super().do_GET()
            body = f"<!doctype html><body><script>{constants}{script}</script>".encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--remote-debugging-port=0", f"--user-data-dir={profile}",
        f"http://127.0.0.1:{server.server_port}/check",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return reports.get(timeout=600)
    finally:
        process.terminate()
        process.wait(60)
        server.shutdown()
        server.server_close()
