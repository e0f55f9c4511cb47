"""A fresh engine on a CPU with AMX answers a first prompt of one token.

Each case is a process of its own: what asks for tiles once has asked for its whole process. The
template of forks asks for none.
"""

import json
import os
import subprocess

import pytest
import torch
from engines import CHECKPOINTS
from forked import PYTHON

from dllm_plugin import default_model

pytestmark = [
    pytest.mark.usefixtures("template"),
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX"
    ),
]

# Prints the permission of the process before and after, and the number of tokens.
SCRIPT = """
import ctypes, json, sys
from vllm import LLM, SamplingParams

ARCH_PRCTL, GET_PERMISSIONS, TILE_DATA = 158, 0x1022, 18

def permitted():
    features = ctypes.c_uint64()
    failed = ctypes.CDLL(None).syscall(ARCH_PRCTL, GET_PERMISSIONS, ctypes.byref(features))
    assert not failed
    return features.value >> TILE_DATA & 1

before = permitted()
llm = LLM(model=sys.argv[1], dtype="bfloat16", enforce_eager=True, max_num_seqs=4,
          kv_cache_memory_bytes=32 << 20)
params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
[output] = llm.generate([{"prompt_token_ids": [10]}], params, use_tqdm=False)
print(json.dumps([before, permitted(), len(output.outputs[0].token_ids)]))
"""
ONEDNN_WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


@pytest.mark.parametrize(
    ("model", "environment"),
    [
        (CHECKPOINTS / "tiny-sdar", {}),
        (CHECKPOINTS / "tiny-fast-dllm-v2", {}),
        (CHECKPOINTS / "tiny-sdar", ONEDNN_WITHOUT_AMX),
        (default_model.path(), ONEDNN_WITHOUT_AMX),
    ],
    ids=["sdar", "fast-dllm-v2", "sdar, oneDNN without AMX", "bundled"],
)
def test_the_shortest_first_prompt_is_answered(
    model: object, environment: dict[str, str]
) -> None:
    done = subprocess.run(
        [PYTHON, "-c", SCRIPT, str(model)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    before, after, tokens = json.loads(done.stdout.splitlines()[-1])
    assert (before, after, tokens) == (0, 1, 1)
