"""Format prompts of the bundled model like its chat template, and name its special tokens."""

from tokenizers import Tokenizer

BOS, EOS, MASK = "<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>"
HEAD, TAIL, EOT = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that must be in the vocabulary."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token!r}")
    return int(found)


def chat_prompt(question: str, system: str | None = None) -> str:
    """Apply the chat template to one user message, behind a system prompt if there is one."""
    before = "" if system is None else f"{HEAD}system{TAIL}\n\n{system}{EOT}"
    return f"{BOS}{before}{HEAD}user{TAIL}\n\n{question.strip()}{EOT}{HEAD}assistant{TAIL}\n\n"
