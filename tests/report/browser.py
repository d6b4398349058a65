"""A real browser that shows a page without a window. Nothing but the installed one is used."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LINES_OF_TEXT = """
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode;
  const words = node.textContent.trim();
  if (!words || !node.parentElement.checkVisibility()) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  for (const box of range.getClientRects()) {
    let { left, top, right, bottom } = box;
    for (let up = node.parentElement; up; up = up.parentElement) {
      if (getComputedStyle(up).overflowX === "visible") continue;
      const edge = up.getBoundingClientRect();
      left = Math.max(left, edge.left); right = Math.min(right, edge.right);
      top = Math.max(top, edge.top); bottom = Math.min(bottom, edge.bottom);
    }
    if (right > left && bottom > top) found.push({ words, left, top, right, bottom });
  }
}
return found;
"""
"""Every line of text that can be seen, as far as what scrolls does not cut it off."""


@dataclass
class Browser:
    """The browser, with what a test asks of it."""

    driver: webdriver.Chrome

    def open(self, page: Path, *, width: int, scheme: str = "light") -> None:
        """Show a page as a device of this width does, whose user wants this scheme."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        for log in ("browser", "performance"):
            self.log(log)
        self.driver.get(page.as_uri())

    def run(self, script: str, *arguments: object) -> Any:
        """Run a script in the page and return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def log(self, kind: str) -> list[dict[str, str]]:
        """Return the entries of a log since it was last asked for."""
        driver: Any = self.driver
        return list(driver.get_log(kind))

    def count(self, selector: str) -> int:
        """Return how many elements a selector finds."""
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def complaints(self) -> list[str]:
        """Return all that was written to the console since the page was opened."""
        return [entry["message"] for entry in self.log("browser")]

    def requests(self) -> list[str]:
        """Return what was asked for since the page was opened, unless the address is the data."""
        events = [json.loads(e["message"])["message"] for e in self.log("performance")]
        sent = [e for e in events if e["method"] == "Network.requestWillBeSent"]
        addresses = [str(event["params"]["request"]["url"]) for event in sent]
        return [address for address in addresses if not address.startswith("data:")]

    def overlaps(self) -> list[tuple[str, str]]:
        """Return pairs of texts of which one covers a part of the other."""
        lines = sorted(self.run(LINES_OF_TEXT), key=lambda line: float(line["top"]))
        found = []
        for place, one in enumerate(lines):
            for other in lines[place + 1 :]:
                if other["top"] >= one["bottom"] - 1:
                    break
                if min(one["right"], other["right"]) - max(one["left"], other["left"]) > 1:
                    found.append((str(one["words"]), str(other["words"])))
        return found


@contextmanager
def started(profile: Path) -> Iterator[Browser]:
    """Start the browser with a new profile, and end it."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
