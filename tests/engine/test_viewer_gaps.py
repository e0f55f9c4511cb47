"""The viewer in Chromium, light and dark, narrow and wide: gaps, a key, a path in front."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from browsers import USED, Viewer, chromium, viewers
from processes import KEY, PROXY, Server, free_port

__all__ = ["chromium"]
pytestmark = pytest.mark.slow

GAPS = "abc [MASK:2] def [MASK:1,2,3] ghi"


@pytest.fixture(params=USED)
def viewer(
    request: pytest.FixtureRequest, chromium: Any, tiny_server: Server
) -> Iterator[Viewer]:
    """The page before anything is asked; short answers."""
    for viewer in viewers(request.param, chromium, tiny_server):
        viewer.open().page.fill("#max-tokens", "24")
        yield viewer
        viewer.check_look()


def test_filled_gaps_are_marked(viewer: Viewer) -> None:
    """What is given stands from the start; what was filled has an underline, in any colours."""
    page = viewer.page
    page.fill("#max-tokens", "9999")  # of no effect here
    viewer.mode("gaps")
    viewer.run(GAPS)
    shown = viewer.positions()
    assert "".join(text for text, _ in shown) == viewer.text() != ""
    assert {kind for _, kind in shown} <= {"given", "token", "stop"}
    given = "".join(text for text, kind in shown if kind == "given")
    assert given == GAPS.replace("[MASK:2]", "").replace("[MASK:1,2,3]", "")
    marked = page.locator("#turns .token > i")
    assert marked.count() > 0
    for tone in ("forward", "confidence"):
        page.check(f"input[name=tone][value={tone}]")
        shadow = "one => getComputedStyle(one).boxShadow"
        assert "inset" in marked.first.evaluate(shadow)
    assert page.locator(".legend .of-gaps").is_visible()
    assert "2,1 \N{RIGHTWARDS ARROW} " in page.inner_text("#numbers")
    viewer.show(0)
    kinds = [kind for _, kind in viewer.positions()]
    assert kinds.count("mask") >= 3 and "token" not in kinds
    page.fill("#question", "What is it?")
    page.press("#question", "Enter")
    viewer.wait()
    asked = viewer.asked[-1]["messages"]
    assert asked == [{"role": "user", "content": "What is it?"}]
    assert viewer.text().startswith("abc ") and viewer.text().endswith(" ghi")
    viewer.check()


def test_a_gap_in_a_question_is_filled(viewer: Viewer) -> None:
    viewer.run(GAPS)
    assert viewer.urls[-1].endswith("/v1/infill") and viewer.problem() == ""
    assert viewer.page.is_checked("input[name=mode][value=gaps]")


@pytest.mark.parametrize("path", ["/", f"{PROXY}/", f"{PROXY}/viewer", PROXY])
def test_paths(viewer: Viewer, path: str) -> None:
    """At the root too, and behind a path in front, under which requests go."""
    viewer.open(path).page.fill("#max-tokens", "4")
    viewer.run("abc")
    front = PROXY if PROXY in path else ""
    assert viewer.urls[-1] == f"{viewer.server.url}{front}/v1/chat/completions"
    assert viewer.problem() == ""
    viewer.check()


def test_a_missing_or_wrong_key(viewer: Viewer) -> None:
    """The sentence says what to enter, and the field waits for it."""
    page = viewer.page
    for key, begins in (
        ("", "This server asks for a key."),
        ("wrong", "This server does not accept this key."),
    ):
        page.fill("#key", key)
        page.evaluate("document.getElementById('connection').open = false")
        page.click("#run")
        viewer.wait("failed")
        page.wait_for_selector("#key[aria-invalid]")
        assert viewer.problem().startswith(begins) and "--api-key" in viewer.problem()
        assert page.evaluate("document.activeElement.id") == "key"
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    viewer.wait()
    assert viewer.problem() == "" and not page.locator("[aria-invalid]").count()


def test_a_second_server(viewer: Viewer) -> None:
    """An address where nobody listens, one that is none, no key, and the answer."""
    page = viewer.page
    page.evaluate("document.getElementById('comparison').open = true")
    here = f"{viewer.server.url}/v1"
    for address, key, sentence, focused in (
        (f"http://127.0.0.1:{free_port()}/v1", "", "Check the address", "other-url"),
        ("no address", "", "is no address. Write one such as", "other-url"),
        (viewer.server.url, KEY, "Most addresses end in /v1.", "other-url"),
        (here, "", f"{here} asks for a key.", "other-key"),
    ):
        page.fill("#other-url", address)
        page.fill("#other-key", key)
        page.click("#run")
        page.wait_for_selector("#run:visible")
        assert sentence in page.inner_text("#other .problem")
        assert page.evaluate("document.activeElement.id") == focused
    page.fill("#other-key", KEY)
    viewer.run("abc")
    page.wait_for_selector("#other[data-state=done]")
    assert page.inner_text("#other .problem") == ""
    assert page.text_content("#other .canvas") == viewer.text()


def aborted(server: Server) -> float:
    """Requests that a client left, as the server counts them."""
    name = "diffuplug:request_forwards_count"
    for line in httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines():
        if line.startswith(name) and 'reason="abort"' in line:
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def stop_at_the_first_token(page: Any) -> None:
    """Run, and press Stop as soon as a token is shown, which no click is sure to meet."""
    page.evaluate(
        "() => new MutationObserver((_, observer) => {"
        " if (!document.querySelector('#turns .token')) return;"
        " observer.disconnect(); document.getElementById('stop').click(); })"
        ".observe(document.getElementById('turns'), { childList: true, subtree: true })"
    )
    page.click("#run")


def test_stop(viewer: Viewer) -> None:
    """The request is aborted on the server; what was decided stays."""
    page, before = viewer.page, aborted(viewer.server)
    page.fill("#max-tokens", "200")
    page.fill("#threshold", "1")
    page.fill("#prompt", "abc")
    # A busy browser may be late, so that the server has sent all.
    for _ in range(10):
        stop_at_the_first_token(page)
        viewer.wait("stopped")
        assert page.is_visible("#run") and page.is_hidden("#stop")
        kinds = {kind for _, kind in viewer.positions()}
        assert {"mask", "token"} <= kinds and viewer.problem() == ""
        assert page.inner_text("#turns .note") == "Stopped."
        deadline = time.monotonic() + 6
        while aborted(viewer.server) == before and time.monotonic() < deadline:
            time.sleep(0.2)
        if aborted(viewer.server) > before:
            break
    assert aborted(viewer.server) > before
    page.fill("#max-tokens", "4")
    viewer.run("abc")
    assert viewer.problem() == ""
