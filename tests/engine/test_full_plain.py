"""The yardstick of the full-attention tests reproduces the references call by call."""

import torch
from full_goldens import cases_of
from full_jobs import Decoder, every_decoder

from dllm_plugin.reference.model import PlainModel


@every_decoder
def test_plain_loops_reproduce_the_traces(
    decoder: Decoder, plain_models: dict[str, PlainModel]
) -> None:
    family, _ = decoder
    for case in cases_of(*decoder):
        text = case.decode(plain_models[family])
        assert text.answer() == case.record["output_ids"], case.name
        wanted = [
            (one["q_start"], one["q_len"], one["kv_len"], sorted(one["new"]))
            for one in case.record["forwards"]
        ]
        assert [(f.start, f.length, f.keys, f.new) for f in text.forwards] == wanted, (
            case.name
        )
        assert len(text.forwards) == case.record["num_forwards"]
        masks = [plain_models[family].mask_id] * case.max_tokens
        rows = plain_models[family].rows_at(0, [*case.prompt, *masks], {})
        for position, row in case.first_logits().items():
            torch.testing.assert_close(rows[position], row, atol=5e-4, rtol=0)
