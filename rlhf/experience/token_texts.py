"""Splits a decoded response into the texts of its tokens."""

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
"""Character that a tokenizer decodes from the first bytes of a longer character."""


def token_texts(token_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text that each token adds to the decoded text of the tokens before it.

    A character of several tokens belongs to the last of them. Each token is decoded with the tokens since the previous
    complete character, because tokenizers decode a token at the start of a text differently.
    """
    texts: list[str] = []
    start = read = 0
    for end in range(1, len(token_ids) + 1):
        known = str(tokenizer.decode(token_ids[start:read]))
        text = str(tokenizer.decode(token_ids[start:end]))
        if len(text) > len(known) and not text.endswith(REPLACEMENT):
            texts.append(text[len(known) :])
            start, read = read, end
        else:
            texts.append("")
    return texts
