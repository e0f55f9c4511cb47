"""What admission refuses of vLLM's own sampling parameters."""

import pickle
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from dllm_plugin.config.options import Options
from dllm_plugin.config.resolution import resolve
from dllm_plugin.engine.admission import request_rules

RULES = request_rules(resolve(Options(), "LLaDAModelLM", 512, 300))
# What vLLM's beam search asks for, but for the log-probabilities of its width.
BEAM = {"max_tokens": 1, "logprobs": 4, "watermarking": False, "detokenize": False}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
        ({"bad_words": ["x" * 65]}, "bad_words"),
        ({"seed": 2**63 - 1, "n": 2}, "seed"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
        (
            {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 3},
            "min_tokens",
        ),
        (BEAM, "use_beam_search is not supported"),
        ({"extra_args": {"dllm_steps": 3_000_000_000}}, "dllm_steps"),
    ],
)
def test_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RULES.validate_params(SamplingParams(**options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop_token_ids": list(range(128)), "bad_words": ["x" * 64]},
        {"seed": 2**63 - 2, "n": 2},
        {"presence_penalty": 0.5, "frequency_penalty": -2.0},
        {"repetition_penalty": 1.1},
        {"allowed_token_ids": [5, 300], "min_tokens": 3},
        {"extra_args": {"other": 1, 3: 1}},
        BEAM | {"watermarking": None},
        BEAM | {"logprobs": None},
    ],
)
def test_accepted(options: dict[str, Any]) -> None:
    RULES.validate_params(SamplingParams(**options))


def test_rules_travel_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps(RULES)).config == RULES.config
