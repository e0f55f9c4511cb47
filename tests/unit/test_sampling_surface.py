"""Check that every sampling parameter of vLLM is honoured, or refused by name."""

from vllm import SamplingParams

from dllm_plugin.config.request.checks import REFUSED

# All that a request may say to vLLM: a new one must be honoured or refused.
SAMPLING_PARAMETERS = """
allowed_token_ids bad_words detokenize extra_args flat_logprobs frequency_penalty ignore_eos
include_stop_str_in_output logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens n
output_kind output_text_buffer_length presence_penalty prompt_logprob_start
prompt_logprob_token_ids prompt_logprobs
repetition_detection repetition_penalty routed_experts_prompt_start seed skip_clone
skip_reading_prefix_cache skip_special_tokens spaces_between_special_tokens stop stop_token_ids
stream_interval structured_outputs temperature thinking_token_budget top_k top_p
trace_decode_token_ids watermarking
"""


def test_every_sampling_parameter_was_considered() -> None:
    """A new one must be honoured or refused before this list may grow."""
    public = {
        name for name in SamplingParams.__struct_fields__ if not name.startswith("_")
    }
    assert public == set(SAMPLING_PARAMETERS.split())
    assert set(REFUSED) <= public


def test_refused_parameters_are_refused_from_their_default_on() -> None:
    defaults = SamplingParams()
    assert {name: getattr(defaults, name) for name in REFUSED} == {
        name: neutral for name, (neutral, _) in REFUSED.items()
    }
