"""Causal sequences beside bidirectional ones on FlashAttention 3, bf16, by plain attention."""

import pytest
import test_flash_graphs as flash
import torch
from engines import CHECKPOINTS, forwards, generate, letters, params, token_ids
from torch.nn.functional import scaled_dot_product_attention

pytestmark = flash.pytestmark
in_process = flash.in_process
PAGE, HEAD, LONGEST, QUERIES = 16, 64, 512, 8
CONTEXTS = [0, 3, 100, 17, 400]
KINDS = [[1, 0, 1, 0, 0], [0, 1, 0, 1, 1], [0] * 5, [1] * 5]


def builder_with_graphs():
    """A builder of ours, the number of its query heads, and what builds keys of its size."""
    from vllm.config import CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from dllm_plugin.attention.flash import SegmentFlashBuilder

    arguments = EngineArgs(str(CHECKPOINTS / "tiny-sdar"), dtype="bfloat16")
    config = arguments.create_engine_config()
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config.compilation_config.max_cudagraph_capture_size = 512
    heads = config.model_config.get_num_attention_heads(config.parallel_config)
    spec = FullAttentionSpec(
        block_size=PAGE, num_kv_heads=heads // 2, head_size=HEAD, dtype=torch.bfloat16
    )
    return SegmentFlashBuilder(spec, [], config, torch.device("cuda")), heads, config


def plain(query, pages, contexts, kinds):
    """Attention of each sequence ``[S, H, D]`` to its own keys, in float32."""
    found = []
    for i, causal in enumerate(kinds):
        size = contexts[i] + QUERIES
        keys, values = pages[i][:, :size].float().split(HEAD, dim=-1)
        sees = torch.ones(QUERIES, size, dtype=torch.bool, device="cuda")
        if causal:
            sees = sees.tril(contexts[i])
        one = query[i].float().transpose(0, 1)
        shape = {"attn_mask": sees, "enable_gqa": True}
        found.append(scaled_dot_product_attention(one, keys, values, **shape))
    return torch.stack(found).transpose(1, 2)


def test_two_masks_in_one_step():
    """Eager and replayed from one graph, whichever sequences are causal."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from dllm_plugin.attention.flash import SegmentFlashImpl

    torch.manual_seed(0)
    builder, heads, config = builder_with_graphs()
    requests, options = len(CONTEXTS), {"device": "cuda", "dtype": torch.bfloat16}
    tokens = requests * QUERIES
    query = torch.randn(tokens, heads, HEAD, **options)
    key = torch.randn(tokens, heads // 2, HEAD, **options)
    each = LONGEST // PAGE
    cache = torch.randn(requests * each, heads // 2, PAGE, 2 * HEAD, **options)
    table = torch.randperm(requests * each, device="cuda").int().view(requests, each)
    with set_current_vllm_config(config):
        impl = SegmentFlashImpl(heads, HEAD, HEAD**-0.5, heads // 2, None, None, "auto")
    layer = torch.nn.Module()
    layer._q_scale = layer._k_scale = layer._v_scale = torch.ones(1, device="cuda")
    bounds = torch.arange(requests + 1, dtype=torch.int32) * QUERIES
    kinds = torch.tensor(KINDS[0], dtype=torch.int32, device="cuda")
    common = CommonAttentionMetadata(
        query_start_loc=bounds.cuda(),
        query_start_loc_cpu=bounds,
        seq_lens=torch.tensor(CONTEXTS, dtype=torch.int32, device="cuda") + QUERIES,
        num_reqs=requests,
        num_actual_tokens=tokens,
        max_query_len=QUERIES,
        max_seq_len=LONGEST,
        block_table_tensor=table,
        slot_mapping=torch.zeros(tokens, dtype=torch.int64, device="cuda"),
        causal=kinds,
    )
    by_request = cache[table.long()].transpose(1, 2).flatten(2, 3)
    per_request = query.view(requests, QUERIES, heads, HEAD)
    found = torch.empty_like(query)

    def step(metadata):
        impl.forward(layer, query, key, key, cache, metadata, found)

    step(builder.build_for_cudagraph_capture(common))
    graph = torch.cuda.CUDAGraph()
    metadata = builder.build_for_cudagraph_capture(common)
    with torch.cuda.graph(graph):
        step(metadata)
    for case in KINDS:
        kinds.copy_(torch.tensor(case))
        expected = plain(per_request, by_request, CONTEXTS, case)
        for run in (lambda: step(builder.build(0, common)), graph.replay):
            builder.build(0, common)
            found.fill_(torch.nan)
            run()
            ours = found.view_as(expected).float()
            torch.testing.assert_close(ours, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("strategy", ["block_diffusion", "self_speculation"])
def test_nemotron_as_on_triton(strategy, in_process):
    """Drafts are accepted as often, and texts agree up to near ties."""
    dllm = {"strategy": strategy, "block_length": 16, "threshold": 0.0}
    if strategy == "block_diffusion":
        del dllm["threshold"]
    prompts = [letters(5 + 9 * n, n) for n in range(7)]
    wishes = [params(40, dllm_block_length=16) for _ in prompts]
    answers, counts = {}, {}
    compiled = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    for name, backend, compilation in (
        ("triton", "TRITON_ATTN", compiled),
        ("flash", "FLASH_ATTN", compiled),
        ("eager", "FLASH_ATTN", flash.EAGER),
    ):
        engine = flash.engine_of("tiny-nemotron", dllm, compilation, backend)
        outputs = generate(engine, prompts, wishes)
        flash.end(engine)
        answers[name] = [token_ids(output) for output in outputs]
        counts[name] = sum(forwards(output) for output in outputs)
    for name in ("flash", "eager"):
        pairs = zip(answers[name], answers["triton"], strict=True)
        shared = sum(ours == theirs for ours, theirs in pairs)
        assert shared >= 4, (name, answers)
        assert abs(counts[name] - counts["triton"]) <= 0.1 * counts["triton"], counts
