"""The viewer in a real Chromium: a page in four looks, and what tests read of it."""

import contextlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from processes import Server

# Wide and narrow windows, and the system's preference of colours.
LOOKS = {
    "wide-light": (1400, 900, "light"),
    "wide-dark": (1400, 900, "dark"),
    "narrow-light": (375, 800, "light"),
    "narrow-dark": (375, 800, "dark"),
}
# The looks in which tests use a page: each width and each preference once. What a test leaves is
# looked at in all four.
USED = ("wide-light", "narrow-dark")
SECONDS = 60_000  # of a wait on a busy machine, in milliseconds
OFFLINE = ("--no-sandbox", "--disable-background-networking", "--disable-sync")

# Elements with text whose contrast with what is painted behind it is below 4.5.
POOR_CONTRAST = """() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const luminance = (layers) => {
    for (const layer of layers) {
      context.fillStyle = layer;
      context.fillRect(0, 0, 1, 1);
    }
    const linear = [...context.getImageData(0, 0, 1, 1).data].map((byte) => {
      const share = byte / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const poor = [];
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].filter((node) => node.nodeType === 3);
    const text = own.map((node) => node.data.trim()).join("") || element.value;
    if (!text || !element.checkVisibility() || element.closest(".unseen, .skip")) continue;
    if (element.matches("[type=range], [type=radio], [type=checkbox], option")) continue;
    const behind = [];
    for (let one = element; one; one = one.parentElement) {
      behind.unshift(getComputedStyle(one).backgroundColor);
    }
    const ground = luminance(behind);
    const letters = luminance([...behind, getComputedStyle(element).color]);
    const [dark, light] = [ground, letters].sort((one, other) => one - other);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < 4.5) poor.push(`${text.slice(0, 20)}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""
# A change of colours takes a moment.
SETTLED = """() => Promise.all(document.getAnimations().map(
  (one) => one.finished.catch(() => null)))"""
# Controls that nothing names.
UNNAMED = """() => [...document.querySelectorAll("input, select, textarea, button")]
  .filter((one) => !one.labels?.length && !one.ariaLabel && !one.textContent.trim())
  .map((one) => one.outerHTML)"""


@contextlib.contextmanager
def browsing() -> Iterator[Any]:
    """Chromium; without it, or what drives it, the test is skipped."""
    reason = "playwright is not installed"
    sync_api = pytest.importorskip("playwright.sync_api", reason=reason)
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no browser named chromium is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=OFFLINE)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for all tests of a file."""
    with browsing() as browser:
        yield browser


class Viewer:
    """The page of a server in a window, and what was asked and complained of."""

    def __init__(self, page: Any, server: Server, scheme: str) -> None:
        self.page = page
        self.scheme = scheme
        self.server = server
        self.problems: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.urls: list[str] = []
        page.set_default_timeout(SECONDS)
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", self._keep)

    def _keep(self, request: Any) -> None:
        self.urls.append(request.url)
        if request.method == "POST":
            self.asked.append(request.post_data_json)

    def open(self, path: str = "/viewer", speed: str = "0") -> "Viewer":
        """Open the page; canvases are shown as they come."""
        self.page.goto(f"{self.server.url}{path}")
        if key := self.server.headers.get("Authorization"):
            self.page.evaluate("document.getElementById('connection').open = true")
            self.page.fill("#key", key.removeprefix("Bearer "))
        self.page.evaluate(
            "value => { const menu = document.getElementById('speed');"
            " menu.value = value; menu.dispatchEvent(new Event('change')); }",
            speed,
        )
        return self

    def wait(self, state: str = "done") -> "Viewer":
        """Wait until the answer that is shown is in a state."""
        self.page.wait_for_selector(f"#stage[data-state={state}]")
        return self

    def run(self, text: str) -> "Viewer":
        """Ask, and wait for the end."""
        self.page.fill("#prompt", text)
        self.page.click("#run")
        return self.wait()

    def mode(self, name: str) -> "Viewer":
        """Choose what is asked for: ask, chat or gaps."""
        self.page.check(f"input[name=mode][value={name}]")
        return self

    def positions(self) -> list[tuple[str, str]]:
        """Text and kind (mask, token, given, stop) of each position of the newest answer."""
        script = "all => all.map(one => [one.textContent, one.className.split(' ')[0]])"
        return [tuple(pair) for pair in self._of_newest(".canvas > span", script)]

    def colours(self) -> list[tuple[str, str]]:
        """The forward and the colour of each token of the newest answer."""
        script = (
            "all => all.map(chip => [chip.parentElement.dataset.forward,"
            " getComputedStyle(chip).backgroundColor])"
        )
        return [tuple(pair) for pair in self._of_newest(".token > i", script)]

    def _of_newest(self, selector: str, script: str) -> Any:
        newest = f"#turns .turn:last-child {selector}"
        return self.page.eval_on_selector_all(newest, script)

    def text(self) -> str:
        """The newest answer, as readers of screens read it."""
        return str(self.page.text_content("#turns .turn:last-child .said"))

    def show(self, share: float) -> None:
        """Move the slider to a share of the run."""
        script = (
            "(slider, share) => { slider.value = Math.max(1, slider.max * share);"
            " slider.dispatchEvent(new Event('input')); }"
        )
        self.page.eval_on_selector("#replay", script, share)

    def problem(self) -> str:
        """The sentence of the newest answer's error."""
        return str(self.page.inner_text("#turns .turn:last-child .problem"))

    def check(self) -> None:
        """Nothing was complained of, comes from elsewhere, is cut, pale or without a name."""
        assert self.problems == []
        assert {re.sub(r"(//[^/]+).*", r"\1", url) for url in self.urls} == {
            self.server.url
        }
        self.check_look()

    def check_look(self) -> None:
        """Nothing is cut off, pale or without a name, in any of the looks."""
        own = self.page.viewport_size
        scrolls, pale = [], {}
        for look, (width, height, scheme) in LOOKS.items():
            self.page.set_viewport_size({"width": width, "height": height})
            self.page.emulate_media(color_scheme=scheme)
            self.page.evaluate(SETTLED)
            if self.page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                scrolls.append(look)
            if poor := self.page.evaluate(POOR_CONTRAST):
                pale[look] = poor
        assert not scrolls, "the page scrolls sideways"
        assert not pale
        assert self.page.evaluate(UNNAMED) == []
        self.page.set_viewport_size(own)
        self.page.emulate_media(color_scheme=self.scheme)


def viewers(look: str, chromium: Any, server: Server, **options: Any) -> Iterator[Any]:
    """Yield a viewer in a window of its own, and close the window."""
    width, height, scheme = LOOKS[look]
    size = {"width": width, "height": height}
    context = chromium.new_context(viewport=size, color_scheme=scheme, **options)
    yield Viewer(context.new_page(), server, scheme)
    context.close()
