"""Makes small tokenizers with the special tokens of model families, and gives them chat templates."""

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
SPECIAL = {
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|python_tag|>",
    ],
    "gemma": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "mistral": [
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
        "[ARGS]",
        "[CALL_ID]",
    ],
    "harmony": [
        "<|startoftext|>",
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|constrain|>",
        "<|return|>",
        "<|call|>",
    ],
}
PLAIN = {"qwen": ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]}
"""Added tokens that are not special."""
BOS = {"llama3": "<|begin_of_text|>", "gemma": "<bos>", "mistral": "<s>", "harmony": "<|startoftext|>"}
EOS = {
    "chatml": "<|im_end|>",
    "qwen": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "harmony": "<|return|>",
}
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The pattern by which Llama 3's and Qwen's tokenizers split text, without English contractions."""
_CORPUS = [
    "What is 12 + 30?\n\nThe answer is 42.\nA thought.\n\n",
    '{"name": "add", "arguments": {"a": 1, "b": 2}}\n{"name": "search", "parameters": {"query": "x"}}\n}}\n',
    'user\nassistant\nsystem\n\nmodel\ntool\nto=functions.add json\ncommentary analysis final " "\n"}]\n',
] * 20
"""Trains merges over line ends and braces, so that a wrong split between texts changes the tokens."""


@cache
def _trained(family: str) -> str:
    if family == "gemma":  # like SentencePiece: no split between words
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.normalizer = normalizers.Replace(" ", "▁")
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = [chr(i) for i in range(33, 127)] + ["▁", "\n"]
        fallback = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=fallback, initial_alphabet=alphabet, show_progress=False, max_token_length=8
        )
    else:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(_CORPUS, trainer)
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL[family]])
    made.add_tokens([AddedToken(token, normalized=False) for token in PLAIN.get(family, [])])
    return made.to_str()


def family_tokenizer(family: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a family with the chat template, if there is one."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(family)),
        bos_token=BOS.get(family),
        eos_token=EOS[family],
        name_or_path=f"some/{family}",
    )
    made.chat_template = template
    return made


def chat_template(name: str) -> str:
    """Return a template of `tests/data/chat_templates`, in the published style of its family."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def tool(name: str, **parameters: str) -> dict[str, Any]:
    """Return the schema of a tool with required parameters and their types."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": f"Calls {name}.", "parameters": schema}}


TOOLS = [tool("add", a="integer", b="integer"), tool("search", query="string"), tool("look")]
