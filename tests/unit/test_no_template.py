"""Which models and strategies fill no gaps, by the sentences of the specification."""

import pytest
from refusals import MASK

from dllm_plugin.config.options import Options
from dllm_plugin.config.request.checks import no_template
from dllm_plugin.config.resolution import resolve

TITLES = {
    "SDARForCausalLM": "SDAR",
    "LLaDA2MoeModelLM": "LLaDA2",
    "Fast_dLLM_QwenForCausalLM": "Fast-dLLM v2",
}
WANTED = pytest.mark.parametrize(
    "wanted", ["suffix", "infill", "likelihood", "dllm_template"]
)


@WANTED
@pytest.mark.parametrize("architecture", TITLES)
def test_models_that_attend_from_block_to_block(architecture: str, wanted: str) -> None:
    config = resolve(Options(), architecture, 512, MASK)
    assert no_template(config, wanted) == (
        f"{wanted} needs a model that sees the text after a gap; {TITLES[architecture]} models "
        "attend causally from block to block. Models that can: LLaDA, LLaDA-MoE, Dream, RND1, A2D."
    )


@WANTED
@pytest.mark.parametrize("strategy", ["d2f", "block_diffusion"])
@pytest.mark.parametrize("architecture", ["LLaDAModelLM", "DreamModel"])
def test_strategies_that_see_nothing_after_a_block(
    architecture: str, strategy: str, wanted: str
) -> None:
    config = resolve(Options(strategy=strategy), architecture, 512, MASK)
    assert no_template(config, wanted) == (
        f"{wanted} needs full attention: under strategy {strategy!r} a block never sees what "
        "comes after it. Use strategy dual_cache, prefix_cache or semi_autoregressive."
    )


@WANTED
@pytest.mark.parametrize(
    "strategy", ["dual_cache", "prefix_cache", "semi_autoregressive"]
)
def test_full_attention_fills_gaps(strategy: str, wanted: str) -> None:
    assert (
        no_template(
            resolve(Options(strategy=strategy), "DreamModel", 512, MASK), wanted
        )
        == ""
    )
