"""``make report-check``: open a page in a real headless Chromium that has no network, and look at what it says of it.

Chromium is driven over two pipes by its own protocol (Chrome DevTools): nothing listens, nothing is installed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WIDTH, TALLEST = 1200, 16_000  # CSS pixels
LONGEST = 60.0  # seconds that one answer may take
# What is on the page, seen by the browser's own layout.
LOOK = """(() => {
  const empty = [...document.querySelectorAll('svg')].filter(one => one.getBoundingClientRect().height < 50).length;
  const root = document.documentElement;
  return {title: document.title, tables: document.querySelectorAll('table').length,
    pictures: document.querySelectorAll('svg').length, empty, wide: root.scrollWidth - root.clientWidth,
    height: Math.ceil(root.getBoundingClientRect().height)};
})()"""


class NoBrowser(RuntimeError):
    """No Chromium is on this machine, or it did not answer."""


@dataclass
class Seen:
    """What the browser said of a page. ``problems``: errors, console messages, requests, parts that show nothing."""

    title: str = ""
    tables: int = 0
    pictures: int = 0
    problems: list[str] = field(default_factory=list)


class Browser:
    """One headless Chromium. Raises NoBrowser if there is none, or if it does not answer."""

    def __init__(self, process: subprocess.Popen[bytes], send: int, receive: int) -> None:
        self.process, self.send, self.receive = process, send, receive
        self.number, self.rest = 0, b""
        self.events: list[Mapping[str, Any]] = []

    def message(self, until: float) -> Mapping[str, Any]:
        """The next answer or event, at the latest at ``until`` (of the monotonic clock)."""
        while b"\0" not in self.rest:
            if not select.select([self.receive], [], [], max(until - time.monotonic(), 0))[0]:
                raise NoBrowser(f"no answer in {LONGEST:g} s")
            piece = os.read(self.receive, 1 << 20)
            if not piece:
                raise NoBrowser(f"the browser ended with {self.process.wait()}")
            self.rest += piece
        text, _, self.rest = self.rest.partition(b"\0")
        return dict(json.loads(text))

    def call(self, method: str, session: str = "", **params: Any) -> Mapping[str, Any]:
        """The answer to one command; events that come before it are kept."""
        self.number += 1
        request = {"id": self.number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        with suppress(BrokenPipeError):  # said by the end of what it answers
            os.write(self.send, json.dumps(request).encode() + b"\0")
        until = time.monotonic() + LONGEST
        while (answer := self.message(until)).get("id") != self.number:
            self.events.append(answer)
        if "error" in answer:
            raise NoBrowser(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def wait(self, method: str) -> None:
        """Until an event has come."""
        until = time.monotonic() + LONGEST
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self.message(until))


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser that ends with the block."""
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        raise NoBrowser(f"none of {', '.join(NAMES)} is installed: see requirements/debian-browser.txt")
    theirs_in, send = os.pipe()
    receive, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The protocol's descriptors are 3 and 4. No sandbox: it wants a user's namespace, and the page is ours.
        process = subprocess.Popen(
            [
                *("bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", program),
                *("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"),
                *(f"--user-data-dir={profile}", "about:blank"),
            ],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(process, send, receive)
        finally:
            os.close(send)
            os.close(receive)
            # All of its processes: the children write into the profile for a while.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def look(path: Path, picture: Path | None = None) -> Seen:
    """Open a file, without a network, every part of it unfolded; write a picture of it if asked to."""
    address = path.resolve().as_uri()
    seen = Seen()
    with browser() as chromium:
        target = chromium.call("Target.createTarget", url="about:blank")["targetId"]
        session = chromium.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            chromium.call(f"{domain}.enable", session)
        chromium.call(
            "Network.emulateNetworkConditions",
            session,
            offline=True,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )
        chromium.call(
            "Emulation.setDeviceMetricsOverride", session, width=WIDTH, height=900, deviceScaleFactor=1, mobile=False
        )
        chromium.events.clear()
        chromium.call("Page.navigate", session, url=address)
        chromium.wait("Page.loadEventFired")
        found = chromium.call("Runtime.evaluate", session, expression=LOOK, returnByValue=True)["result"]["value"]
        seen.title, seen.tables, seen.pictures = found["title"], found["tables"], found["pictures"]
        if picture is not None:
            clip = {"x": 0, "y": 0, "width": WIDTH, "height": min(found["height"], TALLEST), "scale": 1}
            shot = chromium.call("Page.captureScreenshot", session, clip=clip, captureBeyondViewport=True)
            picture.write_bytes(base64.b64decode(shot["data"]))
        seen.problems += said(chromium.events, address)
    if found["empty"]:
        seen.problems.append(f"{found['empty']} pictures show nothing")
    if found["wide"] > 0:
        seen.problems.append(f"the page is {found['wide']} pixels wider than a window of {WIDTH}")
    return seen


def said(events: list[Mapping[str, Any]], address: str) -> Iterator[str]:
    """Errors, messages and requests among a browser's events, but for the request of the page itself."""
    for event in events:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            yield f"exception: {params['exceptionDetails'].get('text')}"
        elif method == "Runtime.consoleAPICalled":
            yield f"console: {params['type']}"
        elif method == "Log.entryAdded":
            yield f"log: {params['entry']['level']}: {params['entry']['text']}"
        elif method == "Network.requestWillBeSent" and params["request"]["url"] != address:
            yield f"request: {params['request']['url'][:120]}"


@click.command()
@click.argument("page", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--picture", type=click.Path(path_type=Path, dir_okay=False), help="Write a PNG of the whole page here.")
def main(page: Path, picture: Path | None) -> None:
    """Open PAGE in a headless Chromium without a network. Exit code 1 if the browser has anything to say of it."""
    try:
        seen = look(page, picture)
    except NoBrowser as error:
        raise click.ClickException(str(error)) from error
    for problem in seen.problems:
        click.echo(problem, err=True)
    click.echo(f"{seen.title}: {seen.tables} tables, {seen.pictures} pictures, {len(seen.problems)} problems")
    raise SystemExit(bool(seen.problems))


if __name__ == "__main__":
    main()
