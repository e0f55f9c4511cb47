"""Format prompts of the bundled model like its chat template, and name its special tokens."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from diffuplug_bench.word_problems.generator import Problem

BOS, EOS, MASK = "<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>"
HEAD, TAIL, EOT = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that must be in the vocabulary."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token!r}")
    return int(found)


def chat_prompt(
    question: str, system: str | None = None, earlier: Sequence[tuple[str, str]] = ()
) -> str:
    """Apply the chat template to a question after a system prompt and (question, answer) pairs."""
    messages = [] if system is None else [("system", system)]
    for asked, answered in earlier:
        messages += [("user", asked), ("assistant", answered)]
    messages.append(("user", question))
    turns = [f"{HEAD}{role}{TAIL}\n\n{text.strip()}{EOT}" for role, text in messages]
    return f"{BOS}{''.join(turns)}{HEAD}assistant{TAIL}\n\n"


def read_tokenizer(folder: Path) -> tuple[Tokenizer, set[int]]:
    """Return the tokenizer of a checkpoint, and the tokens that end an answer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer, {token_id(tokenizer, EOS), token_id(tokenizer, EOT)}


def prompts_of(tokenizer: Tokenizer, problems: Sequence[Problem]) -> list[list[int]]:
    """Return the prompts of problems, each the only message of its chat."""
    return [tokenizer.encode(chat_prompt(one.question)).ids for one in problems]
