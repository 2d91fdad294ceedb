"""A real headless Chromium, driven by its own protocol (DevTools): open, wait for a text, click what says it, look.

DORA_CHROMIUM names the program, else `chromium` of the machine. DORA_SCREENSHOTS: a folder that keeps the pictures.
"""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

from workers.runtime import clock

WAIT_S_MAX = 60.0
CLICK_AGAIN_S = 5.0
_CLICK = """(() => {
  const seen = e => e.getClientRects().length > 0;
  const over = [...document.querySelectorAll('[role=dialog]')].filter(e => seen(e) && e.innerText.includes(%s));
  const all = [...(over[0] || document).querySelectorAll('button, a, [role=button], [role=menuitem], [role=tab]')];
  const found = all.find(e => seen(e) && !e.disabled && e.textContent.trim() === %s);
  if (found) found.click();
  return found !== undefined;
})()"""


def program() -> str | None:
    return os.environ.get("DORA_CHROMIUM") or shutil.which("chromium")


class Page:
    """One tab."""

    def __init__(self, socket: Any, shots: Path) -> None:
        self._socket, self._shots, self._number = socket, shots, 0
        self.ask("Page.enable")
        self.ask("Emulation.setDeviceMetricsOverride", width=1400, height=1200, deviceScaleFactor=1, mobile=False)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=WAIT_S_MAX))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)

    def see(self, text: str, limit_s: float = WAIT_S_MAX) -> None:
        """Wait until the page shows it; AssertionError with what it shows."""
        self._until(_shows(text), text, limit_s)

    def click(self, text: str) -> None:
        """What says exactly this, once it can be clicked."""
        self._until(_CLICK % ('"-"', json.dumps(text)), text, WAIT_S_MAX)

    def confirm(self, title: str, text: str) -> None:
        """Click what says `text` in a dialog or form with this title, again if nothing follows, until that is gone."""
        self.see(title)
        limit = clock.monotonic_s() + WAIT_S_MAX
        while self._value(_shows(title)):
            assert clock.monotonic_s() < limit, f"{title!r} stays whatever is clicked"
            self._value(_CLICK % (json.dumps(title), json.dumps(text)))
            with contextlib.suppress(AssertionError):
                self._until(f"!{_shows(title)}", f"the end of {title}", CLICK_AGAIN_S, shoot=False)

    def shoot(self, name: str) -> None:
        self._shots.mkdir(parents=True, exist_ok=True)
        picture = self.ask("Page.captureScreenshot", format="png")["data"]
        (self._shots / f"{name}.png").write_bytes(base64.b64decode(picture))

    def _until(self, expression: str, what: str, limit_s: float, *, shoot: bool = True) -> None:
        limit = clock.monotonic_s() + limit_s
        while not self._value(expression):
            if clock.monotonic_s() > limit:
                if shoot:
                    self.shoot("not-seen")
                raise AssertionError(f"{what!r} did not come; the page:\n{self._value('document.body.innerText')}")
            threading.Event().wait(0.3)

    def _value(self, expression: str) -> Any:
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")


def _shows(text: str) -> str:
    return f"document.body.innerText.toLowerCase().includes({json.dumps(text.lower())})"


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A fresh profile in `folder`."""
    found = program()
    assert found is not None
    profile = folder / "profile"
    profile.mkdir(parents=True)
    argv = [found, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "about:blank"]
    argv += [f"--user-data-dir={profile}", "--remote-allow-origins=*", "--no-proxy-server"]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
    try:
        port = _port(profile / "DevToolsActivePort")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=WAIT_S_MAX) as answer:
            tab = next(one for one in json.loads(answer.read()) if one["type"] == "page")
        shots = Path(os.environ.get("DORA_SCREENSHOTS") or folder / "screenshots")
        with connect(tab["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
            yield Page(socket, shots)
    finally:
        process.terminate()
        process.wait(30.0)


def _port(file: Path) -> int:
    limit = clock.monotonic_s() + WAIT_S_MAX
    while not file.exists() or not file.read_text().strip():
        assert clock.monotonic_s() < limit, "chromium did not say its port"
        threading.Event().wait(0.1)
    return int(file.read_text().splitlines()[0])
