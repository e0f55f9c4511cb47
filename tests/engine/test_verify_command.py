"""`diffuplug verify` on every family: it agrees, and finds and names what was changed."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heap
import pytest
from engines import CHECKPOINTS
from forked import PYTHON
from safetensors.torch import load_file, save_file

from dllm_plugin.commands import cli
from dllm_plugin.commands.verify import command

pytestmark = pytest.mark.slow

Verify = Callable[..., tuple[int, dict[str, Any], str]]
TEXTS = ["Why is the sky blue?", "abc", "Rivers and lakes, forty characters long.."]


@pytest.fixture
def verify(
    room: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Verify:
    """Run the command in this process: exit status, its JSON line, and what it printed."""
    room.close()
    heap.freeze()
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    # vLLM keeps the stream that it finds at its import, and that of `capsys` is closed soon.
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.__stderr__")
    monkeypatch.setattr(command, "MAX_TOKENS", 40)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(TEXTS) + "\n")

    def run(
        folder: Path, *options: str, dtype: str = "float32"
    ) -> tuple[int, dict[str, Any], str]:
        given = ["--dtype", dtype, "--prompts", str(prompts), *options]
        status = cli.main(["verify", str(folder), *given])
        printed = capsys.readouterr()
        lines = printed.out.splitlines()
        return status, json.loads(lines[-1]) if lines else {}, printed.out + printed.err

    return run


def check_same(
    found: tuple[int, dict[str, Any], str], prompts: int = len(TEXTS)
) -> None:
    status, record, printed = found
    assert status == 0 and record["agree"], printed
    assert (
        len(record["prompts"]) == prompts
        and f"{prompts} of {prompts} prompts agree" in printed
    )
    for one in record["prompts"]:
        assert one["same_tokens"] and one["forwards"][0] == one["forwards"][1]
        assert one["logits_difference"] < 5e-4 and one["difference"] is None
        assert 0 <= max(one["layers"]) < 1e-4


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llada", []),
        ("llada", ["--strategy", "d2f", "--block-length", "16"]),
        ("dream", []),
        ("dream", ["--strategy", "block_diffusion", "--policy", "entropy"]),
        ("dream", ["--strategy", "semi_autoregressive"]),
        ("llada-moe", []),
        ("rnd1", []),
        ("sdar", []),
        ("sdar", ["--policy", "sequential", "--block-length", "8"]),
        ("sdar-moe", ["--policy", "low_confidence"]),
        ("llada2.0", []),
        ("llada2.1", []),
        ("llada2.2", []),
        ("fast-dllm-v2", []),
        ("stable-diffcoder", []),
        ("a2d-qwen3", []),
        ("a2d-qwen3", ["--strategy", "block_diffusion", "--block-length", "8"]),
        ("stable-diffcoder", ["--policy", "low_confidence", "--block-length", "8"]),
        ("fast-dllm-v2-tied", ["--policy", "topk_margin"]),
        ("nemotron", ["--block-length", "8"]),
        ("nemotron", ["--strategy", "self_speculation", "--threshold", "0.6"]),
        ("idlm", []),
        ("wedlm", []),
        ("wedlm-qwen2", []),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else "-".join(value).replace("--", "")
    ),
)
def test_every_family_agrees(name: str, options: list[str], verify: Verify) -> None:
    check_same(verify(CHECKPOINTS / f"tiny-{name}", *options))


def test_a_family_that_is_not_verified(verify: Verify, tmp_path: Path) -> None:
    """DreamReasoner has Dream's model type, but its rows predict their own positions."""
    folder = Path(shutil.copytree(CHECKPOINTS / "tiny-sdar", tmp_path / "reasoner"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "Dream", "architectures": ["DreamForCausalLM"]}
    config |= {"block_size": 8, "mask_token_id": 282}
    (folder / "config.json").write_text(json.dumps(config))
    check_same(verify(folder, "--allow-unverified"))


LAYER = "model.layers.1"
CHANGED = {
    "embedding": ("dream", "model.embed_tokens.weight", "the embedding"),
    "attention": ("dream", f"{LAYER}.self_attn.k_proj.weight", "layer 1"),
    "expert": ("llada2.0", f"{LAYER}.mlp.shared_experts.up_proj.weight", "layer 1"),
    "head": ("sdar", "lm_head.weight", "the logits (final norm or LM head)"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_weight_that_only_one_side_reads_is_named(
    change: str, verify: Verify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, tensor, place = CHANGED[change]
    folder = tmp_path / "changed"
    shutil.copytree(CHECKPOINTS / f"tiny-{name}", folder)
    weights = load_file(folder / "model.safetensors")
    # Turned by one row: the numbers are those of a good checkpoint.
    weights[tensor] = weights[tensor].roll(1, dims=0)
    save_file(weights, folder / "model.safetensors")
    monkeypatch.setattr(command, "folder_of", lambda model, with_code: folder)
    status, record, printed = verify(CHECKPOINTS / f"tiny-{name}")
    assert status == 1 and not record["agree"]
    assert {one["first_difference"] for one in record["prompts"]} == {place}
    assert f"hidden states first differ at {place}" in printed
    assert "0 of 3 prompts agree; 0 of 3 others differ at near ties" in printed
    for one in record["prompts"]:
        assert one["logits_difference"] > 0.01 and not one["same_tokens"]
        assert one["difference"]["near_tie"] is False
        assert (
            len(one["difference"]["engine"]) == len(one["difference"]["reference"]) == 2
        )


# Qwen2 and Qwen3 once more, as a checkpoint might bring it along: a mask says who sees whom.
CODE = """
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class TinyConfig(PreTrainedConfig):
    model_type = "MODEL_TYPE"


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv, self.theta = c.num_attention_heads, c.num_key_value_heads, c.rope_theta
        self.head = getattr(c, "head_dim", None) or c.hidden_size // self.heads
        biased = c.model_type == "Dream"
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.head, bias=biased)
        self.k_proj = nn.Linear(c.hidden_size, self.kv * self.head, bias=biased)
        self.v_proj = nn.Linear(c.hidden_size, self.kv * self.head, bias=biased)
        self.o_proj = nn.Linear(self.heads * self.head, c.hidden_size, bias=False)
        if not biased:
            self.q_norm = nn.RMSNorm(self.head, c.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self.head, c.rms_norm_eps)
        self.biased = biased

    def turn(self, x):
        steps = torch.arange(0, self.head, 2) / self.head
        angle = torch.arange(x.shape[2])[:, None] / self.theta**steps
        angle = torch.cat([angle, angle], -1)
        left, right = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-right, left], -1) * angle.sin()

    def forward(self, x, mask):
        b, n, _ = x.shape
        q = self.q_proj(x).view(b, n, self.heads, self.head)
        k = self.k_proj(x).view(b, n, self.kv, self.head)
        v = self.v_proj(x).view(b, n, self.kv, self.head).transpose(1, 2)
        if not self.biased:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.turn(q.transpose(1, 2)), self.turn(k.transpose(1, 2))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, n, -1))


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x, mask):
        x = x + self.self_attn(self.input_layernorm(x), mask)
        return (x + self.mlp(self.post_attention_layernorm(x)),)


class TinyModel(PreTrainedModel):
    config_class = TinyConfig
    _supports_sdpa = _supports_flex_attn = True

    def __init__(self, config):
        super().__init__(config)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        x = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            (x,) = layer(x, attention_mask)
        return CausalLMOutput(logits=self.lm_head(self.model.norm(x)))
"""


def with_code(folder: Path, name: str, code: str) -> Path:
    """A copy of a tiny checkpoint that brings modelling code along."""
    shutil.copytree(CHECKPOINTS / f"tiny-{name}", folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "modeling_tiny.TinyConfig",
        "AutoModelForCausalLM": "modeling_tiny.TinyModel",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_tiny.py").write_text(
        code.replace("MODEL_TYPE", config["model_type"])
    )
    return folder


TRUSTED = "--trust-remote-code"
OWN = "semi_autoregressive"


@pytest.mark.parametrize(
    ("name", "strategy"), [("dream", OWN), ("sdar", "block_diffusion")]
)
def test_the_checkpoints_own_code(
    name: str, strategy: str, verify: Verify, tmp_path: Path
) -> None:
    folder = with_code(tmp_path / f"own_{name}", name, CODE)
    found = verify(folder, "--strategy", strategy, TRUSTED)
    check_same(found)
    assert found[1]["reference"] == "the checkpoint's own code"


def test_own_code_runs_only_if_it_is_trusted(verify: Verify, tmp_path: Path) -> None:
    folder = with_code(
        tmp_path / "untrusted", "dream", "raise RuntimeError('this ran')"
    )
    found = verify(folder, "--limit", "1", "--strategy", OWN)
    check_same(found, 1)
    assert found[1]["reference"] == "plain torch for dream"


@pytest.mark.parametrize(
    ("name", "old", "new", "strategy", "sentence"),
    [
        (
            "dream",
            "",
            "",
            "dual_cache",
            "keeps no KV as prefix_cache and dual_cache do",
        ),
        (
            "sdar",
            "attn_mask=mask",
            "attn_mask=None",
            "block_diffusion",
            "ignores a mask of blocks",
        ),
        (
            "dream",
            "attn_mask=mask",
            "is_causal=True",
            OWN,
            "attends causally without a mask",
        ),
        (
            "dream",
            "import torch\n",
            "import not_there\n",
            OWN,
            "does not run with the installed",
        ),
    ],
)
def test_own_code_that_cannot_be_compared(
    name: str,
    old: str,
    new: str,
    strategy: str,
    sentence: str,
    verify: Verify,
    tmp_path: Path,
) -> None:
    folder = with_code(
        tmp_path / f"bad_{name}", name, CODE.replace(old, new, 1) if old else CODE
    )
    status, _, printed = verify(folder, "--limit", "1", "--strategy", strategy, TRUSTED)
    assert status == 2 and sentence in " ".join(printed.split())
    assert "leave out --trust-remote-code" in " ".join(printed.split())


@pytest.mark.parametrize("name", ["llada", "rnd1", "wedlm", "nemotron"])
def test_bfloat16_says_what_rounding_explains(name: str, verify: Verify) -> None:
    """Two roundings of one checkpoint: layers agree, and what differs is a near tie."""
    status, record, printed = verify(CHECKPOINTS / f"tiny-{name}", dtype="bfloat16")
    assert {one["first_difference"] for one in record["prompts"]} == {None}, printed
    for one in record["prompts"]:
        assert one["difference"] is None or one["difference"]["near_tie"], printed
        assert one["difference"] is None or "a near tie (0." in printed
    same = [
        one["same_tokens"] and one["difference"] is None for one in record["prompts"]
    ]
    assert status == (0 if all(same) else 1)


@pytest.mark.usefixtures("template")
def test_the_command_line_itself() -> None:
    """In a process of its own, on two ranks: results on standard output, the bar on the other."""
    program = [PYTHON, str(Path(sys.executable).parent / "diffuplug"), "verify"]
    options = ["--limit", "1", "--dtype", "float32", "--tensor-parallel-size", "2"]
    done = subprocess.run(
        [*program, str(CHECKPOINTS / "tiny-llada"), "--strategy", "d2f", *options],
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["agree"] is True and record["tensor_parallel_size"] == 2
    assert "1 of 1 prompts agree" in done.stdout
    # A rate, or its inverse if a decode takes longer than a second.
    assert "decode/s]" in done.stderr or "s/decode]" in done.stderr
