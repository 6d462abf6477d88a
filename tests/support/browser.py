"""Opens pages in headless Chromium over its DevTools protocol, and records requests, errors and pictures."""

import asyncio
import base64
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed (apt-get install chromium)")
DEADLINE_S = 120.0
DESKTOP, PHONE = (1280, 900), (390, 844)


@dataclass
class Visit:
    """What a browser saw: requests, errors of the console, seconds until the page was drawn, the script's result."""

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    load_s: float = 0.0
    result: Any = None


def visit(
    address: str,
    folder: Path,
    *,
    size: tuple[int, int] = DESKTOP,
    dark: bool = False,
    script: str = "null",
    picture: Path | None = None,
) -> Visit:
    """Open an address, evaluate `script` and return what happened; write a picture of the whole page to `picture`."""

    async def run() -> Visit:
        async with asyncio.timeout(DEADLINE_S):
            return await _visit(address, folder, size, dark, script, picture)

    return asyncio.run(run())


async def _visit(
    address: str, folder: Path, size: tuple[int, int], dark: bool, script: str, picture: Path | None
) -> Visit:
    assert PROGRAM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"]
    options += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}"]
    process = await asyncio.create_subprocess_exec(
        PROGRAM, *options, "about:blank", stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stderr is not None
        while (found := re.search(r"ws://\S+", (line := await process.stderr.readline()).decode())) is None:
            assert line, "Chromium ended"
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(found[0], max_msg_size=0) as socket,
        ):
            return await _in_tab(_Tab(socket), address, size, dark, script, picture)
    finally:
        process.kill()
        await process.wait()


class _Tab:
    """Sends commands to a tab, and collects the events that come meanwhile."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number, self.session = socket, 0, ""
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self._number += 1
        session = {"sessionId": self.session} if self.session else {}
        await self._socket.send_json({"id": self._number, "method": method, "params": arguments, **session})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    async def wait_for(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(await self._socket.receive_json())


async def _in_tab(
    tab: _Tab, address: str, size: tuple[int, int], dark: bool, script: str, picture: Path | None
) -> Visit:
    target = (await tab.call("Target.createTarget", url="about:blank"))["targetId"]
    tab.session = (await tab.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
        await tab.call(f"{domain}.enable")
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    await tab.call("Emulation.setDeviceMetricsOverride", **metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    await tab.call("Emulation.setEmulatedMedia", features=[scheme])
    started = time.monotonic()
    await tab.call("Page.navigate", url=address)
    await tab.wait_for("Page.loadEventFired")
    frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
    await tab.call("Runtime.evaluate", expression=frames, awaitPromise=True)
    seen = Visit(load_s=time.monotonic() - started)
    answer = await tab.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
    assert "exceptionDetails" not in answer, answer
    seen.result = answer["result"].get("value")
    if picture is not None:
        shot = await tab.call("Page.captureScreenshot", captureBeyondViewport=True)
        picture.write_bytes(base64.b64decode(shot["data"]))
    for event in tab.events:
        _note(event.get("method"), event.get("params", {}), seen)
    return seen


def _note(method: str | None, facts: dict[str, Any], seen: Visit) -> None:
    if method == "Network.requestWillBeSent":
        seen.requests.append(facts["request"]["url"])
    elif method == "Runtime.exceptionThrown":
        seen.errors.append(str(facts["exceptionDetails"]))
    elif method == "Log.entryAdded" or (method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning")):
        seen.errors.append(str(facts))
