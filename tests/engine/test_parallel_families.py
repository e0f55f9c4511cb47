"""Two ranks decode Nemotron, I-DLM, WeDLM and LLaDA2.2 as recorded."""

from typing import Any

import pytest
import test_causal_goldens as nemotron
import test_causal_window as wedlm
import test_introspective as idlm
import test_structure_goldens as llada22
from engines import CHECKPOINTS
from processes import KILLED_SOON, SETTINGS, offline

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]

# Cases and requests, and the options of the engine; a draft adapter on both ranks.
FAMILIES: dict[str, tuple[Any, list[Any], dict[str, Any]]] = {
    "nemotron": (nemotron, nemotron.drafted(True), nemotron.ADAPTED),
    "idlm": (idlm, idlm.cases(), {"canvas_length": 32}),
    "wedlm": (wedlm, wedlm.cases("wedlm"), {}),
    "llada2.2": (llada22, llada22.cases(), {}),
}


def wish_of(name: str) -> dict[str, Any]:
    """A wish of :func:`processes.offline`."""
    known, cases, dllm = FAMILIES[name]
    engine = SETTINGS | {
        "model": str(CHECKPOINTS / f"tiny-{name}"),
        "enforce_eager": True,
        "tensor_parallel_size": 2,
        "additional_config": {"dllm": dllm},
    }
    requests = []
    for case in cases:
        wish = known.wish(case)
        fields = ("max_tokens", "extra_args", "stop_token_ids")
        given = {field: getattr(wish, field) for field in fields}
        requests.append({"prompt": case["prompt_ids"], "params": given})
    return {"engine": engine, "requests": requests, "register": False}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[list[int]]]:
    """Tokens of four engines, which one script starts after each other."""
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    wishes = [wish_of(name) for name in FAMILIES]
    found = offline(*wishes, **variables | KILLED_SOON)
    return dict(zip(FAMILIES, found, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_tensor_parallel(name: str, answers: dict[str, list[list[int]]]) -> None:
    _, cases, _ = FAMILIES[name]
    for case, got in zip(cases, answers[name], strict=True):
        most = case["settings"].get("max_new_tokens", len(case["output_ids"]))
        assert got == case["output_ids"][:most], case["id"]
