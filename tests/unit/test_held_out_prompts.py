"""The ranks divide the held-out prompts between them, so all ranks must read the same prompts in the same order."""

from datetime import date

from rlhf.assemble.inputs import read_held_out_prompts
from rlhf.config import DataConfig, EnvConfig, RewardConfig
from rlhf.errors import UserError
from tests.support.letters import TEMPLATE, letter_tokenizer
from tests.support.refusals import says
from tests.support.thread_ranks import make_coordinator, run_thread_ranks

SAME, OTHER_ORDER = ["one", "two"], ["two", "one"]


def read(rank: int, folder: str, of_ranks: list[list[str]], templates: list[str]) -> str:
    path = f"{folder}/val_{rank}.jsonl"
    with open(path, "w") as file:  # noqa: PTH123
        file.writelines(f'{{"prompt": "{text}", "answer": "1", "data_source": "s"}}\n' for text in of_ranks[rank])
    data, reward = DataConfig(train_files="train.jsonl", val_files=path), RewardConfig(functions=["exact_match"])
    tokenizer, day = letter_tokenizer(templates[rank]), date(2026, 3, 14)
    try:
        prompts = read_held_out_prompts(data, reward, EnvConfig(), 1, tokenizer, day, make_coordinator())
    except UserError as error:
        return str(error)
    return f"{0 if prompts is None else len(prompts)} prompts"


def test_other_prompts_or_tokens_on_a_rank(tmp_path):
    both = [TEMPLATE, TEMPLATE]
    assert run_thread_ranks(2, read, str(tmp_path), [SAME, SAME], both) == ["2 prompts", "2 prompts"]
    for of_ranks in ([SAME, OTHER_ORDER], [SAME, SAME[:1]]):
        for message in run_thread_ranks(2, read, str(tmp_path), of_ranks, both):
            says(message, "different held-out prompts", "val_", "data.custom_cls")
    for message in run_thread_ranks(2, read, str(tmp_path), [SAME, SAME], [TEMPLATE, f"x{TEMPLATE}"]):
        says(message, "tokenize", "held-out prompts", "model.chat_template")
