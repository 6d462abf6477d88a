"""Makes a tokenizer with one token per character, the character's code, so that tests can read tokens as text."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf.data.items import Prompt

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
"""The messages' texts, then > before the response."""


def letter_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer of ASCII; all other characters are token 0."""
    backend = Tokenizer(models.WordLevel({chr(i): i for i in range(32, 127)} | {"[UNK]": 0}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", name_or_path="some/model")
    made.chat_template = template
    return made


def text_of(prompt: Prompt) -> str:
    """Return the prompt's tokens as text."""
    return "".join(map(chr, prompt.token_ids))
