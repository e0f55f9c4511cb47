"""What `diffuplug verify` calls a difference, and what a near tie; no engine."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import resolved
from test_layers import TREES, imports

from dllm_plugin.commands.verify import PROMPTS, compare, read_prompts, second_opinion
from dllm_plugin.commands.verify.compare import (
    Compared,
    Difference,
    Verdict,
    Watcher,
    compare_first_forward,
)
from dllm_plugin.commands.verify.engine_side import Decided
from dllm_plugin.commands.verify.reference import OwnCode
from dllm_plugin.commands.verify.second_opinion import Job
from dllm_plugin.reference import causal_blocks
from dllm_plugin.reference.text import Result, Step

MASK = 3
ROW = torch.tensor([10.0, 9.99, 2.0, 50.0])


def watch(
    engine: dict[int, int],
    ours: dict[int, int],
    closest: float,
    row: torch.Tensor = ROW,
):
    decided = [Decided(engine, {5: (1, 0.5)})]
    watcher = Watcher(decided, 10, MASK, 0.1)
    watcher(Step({}, {}, 1.0))  # decides nothing
    watcher(Step(ours, {p: row for p in {*engine, *ours}}, closest))
    return watcher.difference


def test_the_same_is_no_difference() -> None:
    assert watch({5: 0, 12: 2}, {5: 0, 13: 1}, 0.0) is None, "behind the answer's end"


@pytest.mark.parametrize(("second", "near"), [(9.99, True), (9.0, False)])
def test_two_tokens(second: float, near: bool) -> None:
    """The mask is never proposed, however large its logit."""
    row = torch.tensor([10.0, second, 2.0, 50.0])
    found = watch({5: 1}, {5: 0}, 1.0, row)
    assert found is not None and found.decided_by == "both" and found.near_tie is near
    assert found.reference == (0, pytest.approx(float(row[:3].softmax(-1)[0])))
    assert (found.engine, found.position, found.forward) == ((1, 0.5), 5, 1)


@pytest.mark.parametrize(("closest", "near"), [(0.001, True), (0.2, False)])
def test_other_positions(closest: float, near: bool) -> None:
    found = watch({5: 0, 6: 1}, {5: 0}, closest)
    assert found is not None and found.decided_by == "engine" and found.near_tie is near
    found = watch({}, {5: 0}, closest)
    assert (
        found is not None and found.decided_by == "reference" and found.near_tie is near
    )


def test_the_size_of_a_difference() -> None:
    """Of two tokens in logits, of a choice in its score; a quarter of rounding moves that."""
    found = watch({5: 1}, {5: 0}, 1.0)
    assert found is not None
    assert (found.apart, found.rounding) == (0.01, 0.1)
    found = watch({5: 0, 6: 1}, {5: 0}, 0.02)
    assert found is not None
    assert (found.apart, found.rounding, found.near_tie) == (0.02, 0.025, True)


def test_a_token_that_the_reference_bans_is_no_near_tie() -> None:
    """Its logit is larger than that of the token which the reference takes."""
    found = watch({5: 1}, {5: 2}, 1.0)
    assert found is not None
    assert (found.apart, found.near_tie) == (pytest.approx(7.99, abs=0.01), False)


def test_rounding_without_a_number_is_unknown() -> None:
    """JSON has no not-a-number."""
    watcher = Watcher([Decided({5: 1}, {})], 10, MASK, float("nan"))
    watcher(Step({5: 0}, {5: torch.full((4,), float("nan"))}, 1.0))
    found = watcher.difference
    assert found is not None and found.rounding is None and not found.near_tie


def test_how_far_an_entropy_moves() -> None:
    """Logits that move by 0.01 towards or away from the mean move it most."""
    row = torch.randn(300, dtype=torch.float64)
    row[MASK] = float("-inf")
    share = row.softmax(-1)
    entropy = torch.special.entr(share).sum()
    away = (row.log_softmax(-1) + entropy).sign() * 0.01
    moved = torch.special.entr((row + away).softmax(-1)).sum() - entropy
    assert abs(float(moved)) == pytest.approx(0.01 * compare._spread(row), rel=0.05)


def verdict(near_tie: bool | None, first: str | None, same: bool = False) -> Verdict:
    theirs: Any = SimpleNamespace(tokens=[1], forwards=2)
    ours = Result([1 if same else 2], 2)
    difference = None
    if near_tie is not None:
        difference = Difference(1, 5, None, None, "both", near_tie, 0.1, 0.2)
    return Verdict(theirs, ours, Compared(0.0, 0.1, [], first), difference)


@pytest.mark.parametrize(
    ("one", "agrees"),
    [
        (verdict(None, None, same=True), True),
        (verdict(True, None), False),
        (verdict(False, None), False),
        (verdict(None, None), False),
        (verdict(True, "layer 1"), False),
    ],
)
def test_a_near_tie_is_counted_but_does_not_agree(one: Verdict, agrees: bool) -> None:
    """What comes after it is compared with another text: faults may hide there."""
    assert one.agrees is agrees
    text = compare.summary([one, verdict(None, None, same=True)])
    assert text.startswith(f"{1 + agrees} of 2 prompts agree")
    is_tie = one.difference is not None and one.difference.near_tie
    is_tie = is_tie and one.compared.first is None
    assert ("1 of 1 others differ at near ties, which rounding" in text) is is_tie


def test_the_surest_of_unsure_masks_may_be_a_near_tie() -> None:
    """No mask is below the threshold: the two lowest entropies are compared."""
    gaps: list[float] = []
    rules = SimpleNamespace(entropy_threshold=0.1, position_penalty=0.0)
    text: Any = SimpleNamespace(rules=rules, close_choice=lambda *new: gaps.extend(new))
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.001], [0.0, 0.0]])
    assert causal_blocks.choose(text, logits, [7, 8, 9]) == [8]
    assert 0 < min(gaps) < 0.001


def test_every_difference_of_a_forward_has_to_be_near() -> None:
    found = watch({5: 1, 6: 2}, {5: 0, 6: 0}, 1.0)
    assert found is not None and not found.near_tie


def compared(change, dtype: torch.dtype, is_mixture: bool, rows: int = 1, exact=None):
    states = [torch.ones(20, 8), torch.ones(20, 8), torch.ones(20, 8)]
    theirs = [state.clone() for state in states]
    if change is not None:
        theirs[change][:rows] += 0.5
    by_position = [dict(enumerate(state)) for state in theirs]
    found = (by_position[:2], by_position[2])
    ours = ([state.to(dtype) for state in states[:2]], states[2])
    return compare_first_forward(found, ours, exact or ours, 18, is_mixture)


def test_what_rounding_does_to_the_checkpoint_is_allowed() -> None:
    """Four times as far as the second implementation is from itself in float32."""
    exact = ([torch.ones(20, 8), torch.full((20, 8), 1.2)], torch.ones(20, 8))
    assert compared(1, torch.bfloat16, False).first == "layer 0"
    assert compared(1, torch.bfloat16, False, exact=exact).first is None


def test_where_numbers_first_differ() -> None:
    places = [
        compared(change, torch.float32, False).first for change in (None, 0, 1, 2)
    ]
    assert places == [
        None,
        "the embedding",
        "layer 0",
        "the logits (final norm or LM head)",
    ]
    assert compared(2, torch.float32, False).logits == 0.5


def test_a_router_may_differ_in_few_rows_of_16_bits() -> None:
    assert compared(1, torch.bfloat16, True).first is None
    assert compared(1, torch.bfloat16, True, rows=5).first == "layer 0"
    assert (
        compared(1, torch.bfloat16, False).first
        == compared(1, torch.float32, True).first
    )


def test_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("one\n\n two \n")
    assert read_prompts(str(file)) == ["one", " two "]
    assert len(read_prompts(PROMPTS)) == 5
    file.write_text("\n \n")
    with pytest.raises(ValueError, match="has no prompt"):
        read_prompts(str(file))


@pytest.mark.parametrize("name", sorted(n for n in TREES if n.startswith("reference")))
def test_the_plain_side_imports_nothing_else_of_ours(name: str) -> None:
    ours = {i.module for i in imports(name) if i.module.startswith("dllm_plugin")}
    assert all(module.startswith("dllm_plugin.reference") for module in ours)
    assert not {
        i.module
        for i in imports(name)
        if i.module.split(".")[0] in ("vllm", "transformers")
    }


def test_a_policy_without_a_plain_loop_is_refused() -> None:
    config = resolved(strategy="block_diffusion")
    second_opinion.check(config)
    new = replace(config, defaults=replace(config.defaults, policy="nearest"))
    with pytest.raises(ValueError, match="no plain loop for policy 'nearest'"):
        second_opinion.check(new)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"strategy": "d2f", "adaptive": "throughput"}, "not 'throughput'"),
        ({"logits_eos_inf": True}, "no plain loop for logits_eos_inf True"),
    ],
)
def test_an_option_without_a_plain_loop_is_refused(
    options: dict[str, Any], sentence: str
) -> None:
    options = {"strategy": "semi_autoregressive"} | options
    with pytest.raises(ValueError, match=sentence):
        second_opinion.check(resolved(**options))


def test_rules_are_those_of_the_engine() -> None:
    config = resolved(strategy="dual_cache", suffix_window=8, steps=3)
    rules = second_opinion.rules_of(Job([1, 2], 40, config, (), 1024))
    assert (rules.strategy, rules.policy) == ("dual_cache", "threshold")
    assert (rules.suffix_window, rules.steps, rules.on_grid) == (8, 3, False)
    assert rules.canvas_length == config.canvas_length


class Unmasked(torch.nn.Module):
    """Code of a checkpoint that takes no mask: position i reads all, or those up to itself."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.embedding = torch.nn.Embedding(8, 8)
        self.layers = torch.nn.ModuleList([torch.nn.Identity()])

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        seen = torch.ones(2 * [input_ids.shape[1]])
        return SimpleNamespace(
            logits=(seen.tril() if self.causal else seen) @ self.embedding(input_ids)
        )


@pytest.mark.parametrize(
    ("causal", "full_attention", "sentence"),
    [
        (False, True, None),
        (True, True, "attends causally without a mask"),
        (True, False, "takes no attention_mask"),
        (False, False, "takes no attention_mask"),
    ],
)
def test_own_code_without_a_mask(
    causal: bool, full_attention: bool, sentence: str | None
) -> None:
    code = OwnCode(Unmasked(causal), shift=False, mask_id=5, num_layers=1)
    if sentence is None:
        code.check(full_attention, keeps_kv=False)
        return
    with pytest.raises(
        ValueError, match=f"own code {sentence}.*leave out --trust-remote-code"
    ):
        code.check(full_attention, keeps_kv=False)
