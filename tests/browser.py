"""Loads a page in a headless Chromium, through the DevTools protocol over a pipe; needs no driver."""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
FLAGS = (
    "--headless", "--no-sandbox", "--no-zygote", "--single-process", "--in-process-gpu", "--remote-debugging-pipe",
    "--no-first-run", "--disable-dev-shm-usage",
)  # fmt: skip
LIMIT_S = 90


def find() -> str | None:
    """A browser's path: $CHROME, or the first on the path."""
    return os.environ.get("CHROME") or next(filter(None, map(shutil.which, NAMES)), None)


class Pages:
    """A browser's end of the pipe. `events` holds what it told unasked."""

    def __init__(self, inward: int, outward: int):
        self._inward, self._outward, self._left, self._number = inward, outward, b"", 0
        self.events: list[dict] = []

    def call(self, method: str, session: str | None = None, **parameters):
        """The result of one command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        os.write(self._outward, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def wait(self, method: str) -> None:
        """Returns once the browser has told this."""
        while not any(event["method"] == method for event in self.events):
            self.events.append(self._next())

    def _next(self) -> dict:
        end = time.monotonic() + LIMIT_S
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._inward], [], [], max(end - time.monotonic(), 0))
            assert ready, f"the browser said nothing for {LIMIT_S} s"
            data = os.read(self._inward, 1 << 16)
            assert data, "the browser ended"
            self._left += data
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def opened(path: str) -> Iterator[Pages]:
    """A browser that runs until the block ends."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # It reads descriptor 3 and writes 4, which here may be taken.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 50) for fd in (theirs_in, theirs_out)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = ["bash", "-c", f'exec "$@" 3<&{high[0]} 4>&{high[1]}', "browser", path, *FLAGS]
        process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}"],
            pass_fds=high,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        try:
            yield Pages(ours_in, ours_out)
        finally:
            process.kill()
            process.wait()
            os.close(ours_in)
            os.close(ours_out)


def measure(pages: Pages, address: str, *, width: int, scheme: str) -> dict[str, object]:
    """Opens a page so wide, in a light or dark scheme.

    Returns:
      scroll (its own width), inner (the window's), paper (its background), messages (of the console, errors included).
    """
    pages.events.clear()
    target = pages.call("Target.createTarget", url="about:blank")["targetId"]
    session = pages.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Page", "Runtime", "Log"):
        pages.call(f"{domain}.enable", session)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    pages.call("Emulation.setDeviceMetricsOverride", session, **size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    pages.call("Emulation.setEmulatedMedia", session, features=features)
    pages.call("Page.navigate", session, url=address)
    pages.wait("Page.loadEventFired")
    asked = "[document.documentElement.scrollWidth, innerWidth, getComputedStyle(document.body).backgroundColor]"
    answer = pages.call("Runtime.evaluate", session, expression=asked, returnByValue=True)
    scroll, inner, paper = answer["result"]["value"]
    pages.call("Target.closeTarget", targetId=target)
    told = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening")
    messages = [event for event in pages.events if event["method"] in told]
    return {"scroll": scroll, "inner": inner, "paper": paper, "messages": messages}
