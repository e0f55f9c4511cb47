"""Pages that leave a GPU for main memory by vLLM's connector, and come back."""

import pytest
import recorded
from engines import a_prompt, generate, params, token_ids

PAGE = 32
LENGTHS = (1, 31, 32, 33, 64, 97, 160, 200)


def total(engine, name):
    """Return the sum of a counter over its labels."""
    return sum(one.value for one in engine.get_metrics() if one.name == name)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_prompts_and_texts_come_back(eager):
    """Three turns of eight chats, with nothing left on the GPU between turns."""
    extra = {"cpu_bytes_to_use": 256 << 20, "offload_prompt_only": False}
    engine = recorded.start(
        "checkpoints/tiny-sdar",
        {},
        block_size=PAGE,
        enforce_eager=eager,
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
    )
    try:
        texts = [a_prompt(length, length) for length in LENGTHS]
        for turn in range(3):
            salted = [
                {"prompt_token_ids": text, "cache_salt": f"{turn} {i}"}
                for i, text in enumerate(texts)
            ]
            plain = engine.generate(salted, params(52), use_tqdm=False)
            assert engine.reset_prefix_cache()
            found = generate(engine, texts, params(52))
            assert engine.reset_prefix_cache()
            again = generate(engine, texts, params(52))
            assert engine.reset_prefix_cache()
            answers = [token_ids(output) for output in plain]
            assert [token_ids(output) for output in found] == answers
            assert [token_ids(output) for output in again] == answers
            texts = [
                text + answer + a_prompt(3, turn)
                for text, answer in zip(texts, answers, strict=True)
            ]
        assert total(engine, "vllm:kv_offload_load_bytes") > 0
    finally:
        engine.llm_engine.engine_core.shutdown()
