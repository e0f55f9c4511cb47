"""What a user's script does: ``LLM(...).generate(...)``. Run by :func:`processes.offline`."""

import json
import sys
from pathlib import Path
from typing import Any


def tokens_of(wish: dict[str, Any]) -> list[list[int]]:
    """Start an engine, run the requests, end it."""
    if wish.get("register"):
        import dllm_plugin

        dllm_plugin.register()
        dllm_plugin.register()
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(**wish["engine"])
    requests = wish["requests"]
    if parts := wish.get("updates"):
        llm.start_weight_update()
        for part in parts:
            llm.update_weights({"update_info": part})
        llm.finish_weight_update()
    adapters = {
        folder: LoRARequest(folder, number, folder)
        for number, folder in enumerate(
            sorted({r.get("adapter", "") for r in requests} - {""}), 1
        )
    }
    params = [
        SamplingParams(**{"temperature": 0, "ignore_eos": True} | r["params"])
        for r in requests
    ]
    for given in params:
        if given.structured_outputs is not None:
            given.structured_outputs = StructuredOutputsParams(
                **given.structured_outputs
            )
    outputs = llm.generate(
        [{"prompt_token_ids": request["prompt"]} for request in requests],
        params,
        use_tqdm=False,
        lora_request=[adapters.get(request.get("adapter")) for request in requests],
    )
    llm.llm_engine.engine_core.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(
        json.dumps([tokens_of(wish) for wish in json.loads(sys.argv[1])])
    )
