"""An engine on a CPU without bfloat16 units, as oneDNN's own variable makes it."""

import pytest
import torch
from engines import EngineRoom, generate, letters, params, results


def test_auto_decodes_in_float32(
    room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token for token what `--dtype float32` gives."""
    prompts, wish = [letters(9, seed) for seed in range(3)], params(24)
    asked = results(generate(room.start(dtype="float32"), prompts, wish))
    room.close()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    llm = room.start(dtype="auto")
    assert llm.llm_engine.model_config.dtype == torch.float32
    assert results(generate(llm, prompts, wish)) == asked
    room.close()
