"""The viewer in Chromium, light and dark, narrow and wide: the bundled model."""

import io
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browsers import USED, Viewer, chromium, viewers
from PIL import Image
from processes import Server

from dllm_plugin.decoding.families import STRATEGY_NAMES
from dllm_plugin.decoding.methods import METHODS

__all__ = ["chromium"]
pytestmark = pytest.mark.slow

QUESTION = (
    "Omar has 7 pencils. Anna has 48 pencils and hands them all to Omar. "
    "Omar sells 26 pencils at the market. How many pencils does Omar have now?"
)
SECOND = (
    "A book has 96 pages. Mia reads 9 pages a day for 8 days. How many pages are left?"
)
PICTURE_BYTES = 300_000
STEP_BY_STEP = {"dllm_threshold": 1}  # one token a forward


@pytest.fixture(params=USED)
def viewer(
    request: pytest.FixtureRequest, chromium: Any, bundled_server: Server
) -> Iterator[Viewer]:
    """The page before anything is asked."""
    for viewer in viewers(request.param, chromium, bundled_server):
        yield viewer.open()
        viewer.check()


def answer_of(server: Server, *messages: str, **arguments: Any) -> dict[str, Any]:
    """What the server answers without frames; roles take turns."""
    turns = []
    for place, text in enumerate(messages):
        role = "assistant" if place % 2 else "user"
        turns.append({"role": role, "content": text})
    body = {"messages": turns, "max_tokens": 128, "temperature": 0, "diffusion": {}}
    reply = server.post("chat/completions", body | {"vllm_xargs": arguments})
    return dict(reply.json())


def test_tokens_keep_their_colours(viewer: Viewer) -> None:
    """By forward and by confidence, with a legend; stop tokens are not shown."""
    page = viewer.page
    page.fill("#threshold", "1")
    viewer.run(QUESTION)
    plain = answer_of(viewer.server, QUESTION, **STEP_BY_STEP)
    text = plain["choices"][0]["message"]["content"]
    assert viewer.text() == text
    shown = viewer.positions()
    assert "".join(part for part, kind in shown if kind == "token") == text
    assert {kind for part, kind in shown} == {"token", "stop"}
    assert page.locator("#turns .stop").first.is_hidden()
    by_forward = viewer.colours()
    assert len(set(by_forward)) == len({forward for forward, _ in by_forward}) > 9
    took = plain["choices"][0]["diffusion"]
    numbers = page.inner_text("#numbers").split("\n")
    assert numbers[numbers.index("forwards") + 1] == str(took["forwards"])
    assert numbers[numbers.index("tokens") + 1] == str(took["tokens"])
    assert page.inner_text("#scale-high") == str(took["forwards"])
    page.check("input[name=tone][value=confidence]")
    by_confidence = viewer.colours()
    assert [colour for _, colour in by_confidence] != [c for _, c in by_forward]
    assert page.inner_text("#scale-low") == "confidence 0"
    # Half way, a token is decided in front of which a mask is left.
    viewer.show(0.5)
    kinds = [kind for _, kind in viewer.positions()]
    last = len(kinds) - 1 - kinds[::-1].index("token")
    assert "mask" in kinds[:last]
    page.locator("#turns .token").first.click()
    assert "confidence" in page.inner_text("#detail")


def test_a_short_run_is_shown_slowly(viewer: Viewer) -> None:
    """By itself, after all has arrived; a control has other speeds, and a button replays."""
    page = viewer.page
    page.fill("#threshold", "1")
    # The canvases that are shown, and when, in milliseconds.
    page.evaluate(
        "() => { window.shown = []; const show = Turn.prototype.show;"
        " Turn.prototype.show = function (place, tone) {"
        " window.shown.push([place, performance.now()]); show.call(this, place, tone); }; }"
    )
    page.eval_on_selector("#player", "player => { player.hidden = false; }")
    page.select_option("#speed", "2")
    viewer.run(QUESTION)
    shown = page.evaluate("window.shown")
    newest = int(page.get_attribute("#replay", "max"))
    assert [place for place, _ in shown] == list(range(newest + 1))
    # However fast they came: 39 in 2.5 s.
    times = [time for _, time in shown[1:]]
    assert min(after - before for before, after in pairwise(times)) > 60
    assert page.inner_text("#pace").startswith("Took ")
    page.select_option("#speed", "0.25")
    page.click("#play")
    viewer.wait("replaying")
    page.click("#play")
    viewer.wait()
    assert page.get_attribute("#play", "aria-label") == "Replay"
    assert int(page.input_value("#replay")) < newest


@pytest.mark.parametrize("keys", ["Enter", "Control+Enter"])
def test_keys_run(viewer: Viewer, keys: str) -> None:
    page = viewer.page
    page.fill("#prompt", "What can you")
    page.press("#prompt", "End")
    page.press("#prompt", "Shift+Enter")
    page.type("#prompt", "do?")
    assert viewer.asked == []
    page.press("#prompt", keys)
    viewer.wait()
    [asked] = viewer.asked
    assert asked["messages"][0]["content"] == "What can you\ndo?"


def test_a_chat_has_several_turns(viewer: Viewer) -> None:
    page = viewer.page
    viewer.run(SECOND)  # a question before a chat is no part of it
    viewer.mode("chat").run(QUESTION)
    assert page.locator("#turns .turn").count() == 1
    assert len(viewer.asked.pop(0)["messages"]) == len(viewer.asked[0]["messages"]) == 1
    first = viewer.text()
    assert page.input_value("#prompt") == ""
    viewer.run(SECOND)
    plain = answer_of(viewer.server, QUESTION, first, SECOND)
    assert viewer.text() == plain["choices"][0]["message"]["content"]
    assert len(viewer.asked[1]["messages"]) == 3
    assert page.locator("#turns .turn").count() == 2
    assert page.locator("#turns .turn:first-child .token").count() > 20
    page.locator(".again").first.click()
    viewer.wait()
    assert page.locator(".turn.current").first.inner_text().startswith(QUESTION[:20])
    page.click("#new-chat")
    assert page.locator("#turns .turn").count() == 0


def test_examples_run_when_clicked(viewer: Viewer) -> None:
    page = viewer.page
    examples = page.locator("#examples button")
    assert examples.count() >= 3
    examples.nth(1).click()
    viewer.wait()
    [asked] = viewer.asked
    assert asked["messages"][0]["content"] == page.input_value("#prompt") != ""
    assert viewer.text() != ""


def test_policies_are_a_menu(viewer: Viewer) -> None:
    """Those of the server's strategy; the server takes each of them."""
    page = viewer.page
    policies = METHODS[page.inner_text("#served-strategy"), "llada"].policies
    names = page.locator("#policy option").all_inner_texts()
    assert sorted(name.removesuffix(" (default)") for name in names) == sorted(policies)
    assert "(default)" in names[0]
    page.evaluate("document.getElementById('connection').open = true")
    page.fill("#max-tokens", "24")
    for policy in set(policies) - {"threshold"}:
        page.select_option("#policy", policy)
        viewer.run(QUESTION)
        assert viewer.asked[-1]["vllm_xargs"] == {"dllm_policy": policy}
        assert viewer.problem() == "" and viewer.text() != ""
        assert page.inner_text("#policy-hint") != ""


def test_the_page_names_what_it_shows(viewer: Viewer) -> None:
    """Product, model and strategy; everything fits, is named and can be read."""
    page = viewer.page
    assert page.inner_text(".name") == "DiffuPlug"
    assert page.get_attribute(".name", "href") == "./"
    assert page.inner_text("#served-model") == "tiny"
    assert page.inner_text("#served-strategy") in STRATEGY_NAMES
    for mode in ("ask", "chat", "gaps"):
        viewer.mode(mode)
        for details in page.locator("details").all():
            details.evaluate("one => { one.open = true; }")
        viewer.check_look()
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != (
        "none"
    )


def test_the_picture_of_the_documents(
    chromium: Any, bundled_server: Server, tmp_path: Path
) -> None:
    """`PICTURE=docs/viewer.png` keeps it: half way through an answer, below 300 kB."""
    for viewer in viewers(
        "wide-light", chromium, bundled_server, device_scale_factor=2
    ):
        viewer.open().page.fill("#threshold", "1")
        viewer.run(QUESTION)
        viewer.show(0.55)
        viewer.page.mouse.move(0, 0)
        # The other name of this server's model, and the speed of a new page.
        name = "document.getElementById('served-model').textContent = 'diffuplug'"
        viewer.page.evaluate(name)
        viewer.page.select_option("#speed", "1")
        viewer.page.wait_for_timeout(1000)  # chips appear
        taken = viewer.page.screenshot(
            clip={"x": 0, "y": 0, "width": 1400, "height": 850}
        )
    picture = Image.open(io.BytesIO(taken)).convert("RGB").quantize(256)
    file = Path(os.environ.get("PICTURE", tmp_path / "viewer.png"))
    picture.save(file, optimize=True)
    assert file.stat().st_size < PICTURE_BYTES
