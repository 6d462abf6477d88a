"""Removes or breaks special tokens in a text, so that the text cannot end its message and continue as another role."""

from typing import Any


class SpecialTexts:
    """The texts that a tokenizer reads as special tokens, the longest first."""

    def __init__(self, tokenizer: Any) -> None:
        texts = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._texts = sorted(texts, key=lambda text: (-len(text), text))

    def without(self, text: str) -> str:
        """Return the text without special tokens."""
        for special in self._texts:
            text = text.replace(special, "")
        return text

    def harmless(self, text: str) -> str:
        """Return the text with a space after the first character of each special token."""
        for special in self._texts:
            text = text.replace(special, f"{special[0]} {special[1:]}")
        return text
