"""The viewer in a real browser, against a real server."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import Server, serving

from dllm_plugin import default_model

pytestmark = pytest.mark.slow

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed"
)
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("no browser named chromium is installed", allow_module_level=True)

KEY = "secret"
NUMBERS = {"dllm_policy": "low_confidence"}
OPTIONS = (
    '--additional-config={"dllm": {"strategy": "dual_cache"}}',
    f"--api-key={KEY}",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The bundled model by dual cache: one token a step with `low_confidence`."""
    log = tmp_path_factory.mktemp("viewer") / "log"
    with serving(log, *OPTIONS, model=Path(default_model.path())) as server:
        yield server


@pytest.fixture
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield browser
        browser.close()


def spans(page: Any) -> list[tuple[str, bool]]:
    """Text of each position of the left pane, and whether it is a mask."""
    script = "all => all.map(one => [one.textContent, one.className === 'mask'])"
    return [
        tuple(pair) for pair in page.eval_on_selector_all("#left .text span", script)
    ]


def test_watch_an_answer(server: Server, browser: Any) -> None:
    page, problems, origins = browser.new_page(), [], set()
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: origins.add(request.url.split("/")[2]))
    page.goto(f"{server.url}/viewer")
    page.fill("#key", KEY)
    page.fill("#max-tokens", "64")
    page.fill("#policy", "low_confidence")
    page.fill("#other-url", f"{server.url}/v1")
    page.fill("#other-key", KEY)
    question = page.input_value("#prompt")
    page.click("#run")
    page.wait_for_selector("#left[data-state=done]", timeout=120_000)
    page.wait_for_selector("#right[data-state=done]", timeout=120_000)
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 64}
    body |= {"model": "tiny", "temperature": 0, "vllm_xargs": NUMBERS, "diffusion": {}}
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"{server.url}/v1/chat/completions"
    plain = httpx.post(url, json=body, headers=headers, timeout=120).json()
    text = plain["choices"][0]["message"]["content"]
    assert page.get_attribute("#left", "data-text") == text
    named = "".join(part for part, _ in spans(page))
    assert re.sub(r"<\|\w+\|>", "", named).strip() == text.strip()
    took, numbers = plain["metrics"]["diffusion"], page.inner_text("#left .numbers")
    assert (
        f"forwards {took['forwards']} " in numbers
        and f"tokens {took['tokens']} " in numbers
    )
    assert "29" in page.inner_text("#right .text")
    # Half way, a position is set behind one that is a mask: the text forms out of order.
    page.eval_on_selector(
        "#replay",
        "el => { el.value = el.max / 2; el.dispatchEvent(new Event('input')); }",
    )
    masks = [masked for _, masked in spans(page)]
    assert (
        not masks[-1 - masks[::-1].index(False)]
        and True in masks[: masks[::-1].index(False)]
    )
    page.select_option("#tone", "forward")
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=f"{folder}/viewer.png")
    assert problems == [] and origins == {server.url.removeprefix("http://")}


QUESTION = (
    "Omar has 7 pencils. Anna has 48 pencils and hands them all to Omar. "
    "Omar sells 26 pencils at the market. How many pencils does Omar have now?"
)
GAPS = "With the pencils from Anna, Omar has [MASK:2] + 48 = [MASK:1,2,3] pencils."


def test_watch_an_infill(server: Server, browser: Any) -> None:
    """Gaps of a text: what is given stands from the start, and the replay ends with the fill."""
    page, problems = browser.new_page(), []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(f"{server.url}/viewer")
    page.fill("#key", KEY)
    page.fill("#policy", "low_confidence")
    page.fill("#question", QUESTION)
    page.fill("#prompt", GAPS)
    page.click("#run")
    page.wait_for_selector("#left[data-state=done]", timeout=120_000)
    assert page.inner_text("#left .error") == ""
    told = page.get_attribute("#left", "data-text")
    assert told.startswith("With the pencils from Anna, Omar has ") and told.endswith(
        "pencils."
    )
    assert "".join(part for part, _ in spans(page)).startswith(told[:30])
    assert "scores of lengths 2,1: -" in page.inner_text("#left .numbers")
    assert not any(masked for _, masked in spans(page))
    page.eval_on_selector(
        "#replay", "el => { el.value = 1; el.dispatchEvent(new Event('input')); }"
    )
    first = spans(page)
    assert sum(masked for _, masked in first) >= 3, "the gaps are open"
    given = "".join(part for part, masked in first if not masked)
    assert given == GAPS.replace("[MASK:2]", "").replace("[MASK:1,2,3]", "")
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=f"{folder}/infill.png")
    assert problems == []


def test_a_wrong_key_shows_the_sentence(server: Server, browser: Any) -> None:
    page = browser.new_page()
    page.goto(f"{server.url}/viewer")
    page.fill("#key", "wrong")
    page.click("#run")
    page.wait_for_selector("#left[data-state=done]", timeout=60_000)
    assert page.inner_text("#left .error") == "Unauthorized"
