"""Texts of single tokens: together they are the decoded response."""

import pytest

from rlhf.experience.token_texts import token_texts
from tests.support.families import SPECIAL, family_tokenizer

TEXT = " Two words,  spaces\nand a line: 12 + 7 = 19; naïve Ünïcode 数学 🙂 and the end."


@pytest.mark.parametrize("family", SPECIAL)
def test_the_texts_of_all_tokens_are_the_response(family):
    tokenizer = family_tokenizer(family)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    texts = token_texts(ids, tokenizer)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.decode(ids)


def test_a_character_of_several_tokens_belongs_to_the_last():
    tokenizer = family_tokenizer("qwen")
    character = tokenizer.encode("🙂", add_special_tokens=False)
    assert len(character) > 1
    earlier = [""] * (len(character) - 1)
    assert token_texts([*character, *character], tokenizer) == [*earlier, "🙂", *earlier, "🙂"]
    assert token_texts(character[:-1], tokenizer) == earlier
