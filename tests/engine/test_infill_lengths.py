"""Lengths of gaps that the server chooses: which it tries, and several texts of the best."""

import httpx
from infill_requests import CHOSEN, GREEDY, LENGTHS, post, stream


def test_lengths_that_nobody_names(client: httpx.Client) -> None:
    """What fits of 4, 8, 16 and so on, `max_tokens`, and nothing below `min_tokens`."""
    reply = post(client, "fim/completions", CHOSEN)
    [choice] = reply["choices"]
    assert [one["length"] for one in choice["diffusion"]["lengths"]] == [4, 8, 12]
    assert set(choice["diffusion"]) == {"lengths"} and reply["metrics"] is None
    assert choice["logprobs"] is None and choice["token_ids"] is None
    assert choice["message"]["content"] == choice["text"]
    for body, lengths in (
        ({"min_tokens": 6}, [8, 12]),
        ({"max_tokens": 4096}, [4, 8, 16, 32, 64, 128]),
        ({"suffix": "?", "max_tokens": 5}, [4, 5]),
    ):
        [choice] = post(client, "completions", CHOSEN | body)["choices"]
        assert [one["length"] for one in choice["diffusion"]["lengths"]] == lengths
    [choice] = post(client, "completions", CHOSEN | {"max_tokens": 4})["choices"]
    assert "diffusion" not in choice, "a single length is not chosen"


def test_several_texts_have_the_length_of_the_best(client: httpx.Client) -> None:
    """Choices as with that length alone, each with the scores; a stream has them, too."""
    sampled = CHOSEN | {"n": 3, "temperature": 0.8, "seed": 5}
    body = sampled | {"diffusion": {"lengths": LENGTHS}}
    reply = post(client, "completions", body)
    first = reply["choices"][0]["diffusion"]["lengths"]
    best = max(first, key=lambda one: one["score"])["length"]
    for choice in reply["choices"]:
        assert choice["diffusion"].pop("lengths") == first
    alone = post(client, "completions", sampled | {"diffusion": {"lengths": best}})
    assert reply["choices"] == alone["choices"]
    took, least = reply["metrics"]["diffusion"], alone["metrics"]["diffusion"]
    assert took["forwards"] > least["forwards"] + len(LENGTHS)
    chunks = stream(client, "completions", body)
    texts = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = choice["text"]
    assert texts == {one["index"]: one["text"] for one in alone["choices"]}
    gaps = GREEDY | {"temperature": 1.0, "text": "The sky is [MASK:2,4]!", "n": 2}
    one, other = post(client, "infill", gaps)["choices"]
    assert (one["index"], other["index"]) == (0, 1)
    assert one["diffusion"]["lengths"] == other["diffusion"]["lengths"]
