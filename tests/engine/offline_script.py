"""What a user's script does: ``LLM(...).generate(...)``. Run by :func:`processes.offline`."""

import json
import sys
from typing import Any


def main(wish: dict[str, Any]) -> None:
    """Start the engine, run the requests, print the tokens."""
    if wish.get("register"):
        import dllm_plugin

        dllm_plugin.register()
        dllm_plugin.register()
    from vllm import LLM, SamplingParams

    llm = LLM(**wish["engine"])
    requests = wish["requests"]
    outputs = llm.generate(
        [{"prompt_token_ids": request["prompt"]} for request in requests],
        [SamplingParams(temperature=0, ignore_eos=True, **r["params"]) for r in requests],
        use_tqdm=False,
    )
    print("RESULT " + json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
