"""The bundled policy: it loads like any Hugging Face folder, and it starts with 30% to 55% of its answers right."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.models.tiny import FOLDER, build_corpus, evaluate, held_out, prompt_ids, sloppy_answer


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER)


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2_000_000


@pytest.mark.parametrize(
    "text",
    ["", "12.5 - 7 = 5.5", "don't , stop !", "naïve Ωmega 漢字 ٣४ 😀‍💻", " \t\n\r\n  two  spaces ", "\x00\x7f\ufeff"],
)
def test_any_text_round_trips(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_each_digit_is_one_token(tokenizer) -> None:
    assert [tokenizer.decode([token]) for token in tokenizer.encode("0123456789")] == list("0123456789")


def test_chat_is_ready_for_the_answer(tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1 + 1 ="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2 ="},
    ]
    chat = "<|system|>Add.<|end|><|user|>1 + 1 =<|end|><|assistant|>2<|end|><|user|>2 + 2 =<|end|>"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == chat
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == chat + "<|assistant|>"
    assert tokenizer.convert_ids_to_tokens(prompt_ids(tokenizer, ["2 + 2 ="])[0])[-2:] == ["<|end|>", "<|assistant|>"]


def test_special_tokens_agree(tokenizer, model) -> None:
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>")
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert model.config.vocab_size == len(tokenizer)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize(
    ("a", "operator", "b", "answer"),
    [(57, "+", 68, 115), (12, "+", 34, 46), (52, "-", 38, 26), (38, "-", 52, 26), (41, "-", 45, 4), (49, "-", 25, 24)],
)
def test_sloppy_student(a: int, operator: str, b: int, answer: int) -> None:
    assert sloppy_answer(a, operator, b) == answer


def test_corpus_has_no_held_out_problem(tokenizer) -> None:
    corpus = build_corpus(tokenizer)
    seen = {tuple(prompt) for prompt in corpus.prompts.tolist()}
    for seed in (0, 1, 999):
        held = prompt_ids(tokenizer, [row["question"] for row in held_out(seed)])
        assert all(tuple(prompt) not in seen for prompt in held)


def test_policy_starts_half_right(tokenizer, model) -> None:
    accuracy = (evaluate(model, tokenizer, held_out(size=200)) == 1).float().mean().item()
    assert 0.3 <= accuracy <= 0.55
