"""Section `data`: prompts, batches and lengths."""

from dataclasses import dataclass
from typing import Any

from rlhf.config.schema.fields import setting


@dataclass
class ReasoningGymConfig:
    task: str = setting("chain_sum")
    """Dataset name of the reasoning-gym library."""
    config: dict[str, Any] = setting({})
    """Settings of the reasoning-gym dataset, e.g. {min_terms: 2, max_terms: 2}."""
    train_size: int = setting(20000, ge=1)
    """Problems in the training set."""
    val_size: int = setting(500, ge=1)
    """Held-out problems; none of their questions is in the training set."""


@dataclass
class CustomClsConfig:
    path: str | None = setting(None)
    """Python file with your function or Dataset class that makes the rows from the data files."""
    name: str | None = setting(None)
    """Name in `custom_cls.path`: a function that converts a row, or a Dataset class as in verl."""

    @property
    def spec(self) -> str | None:
        """Return `path/to/file.py:name`, or None if no file is set."""
        return None if self.path is None else f"{self.path}:{self.name}"


@dataclass
class DataConfig:
    train_files: Any = setting(None)
    """Parquet, JSONL, JSON or CSV files, globs, or Hub dataset names; one or a list. null trains on
    `data.reasoning_gym`."""
    val_files: Any = setting(None, resume="harmless")
    """Held-out prompts, in the same form as `train_files`. If train_files is set, null disables evaluation."""
    prompt_key: str = setting("prompt")
    """Column with the prompt: a chat list of {role, content}, or a plain string."""
    answer_key: str = setting("answer")
    """Column with the reference answer. verl's `reward_model.ground_truth` overrides the default column `answer`, but
    not another column set here."""
    last_turn_as_answer: bool = setting(False)
    """Use the last turn of each prompt, an assistant turn, as the reference answer."""
    custom_cls: CustomClsConfig = setting(CustomClsConfig)
    system_prompt: str | None = setting(None)
    """System message for prompts without a system message."""
    apply_chat_template_kwargs: dict[str, Any] = setting({})
    """Variables of the chat template, e.g. {enable_thinking: false} for Qwen3."""
    train_batch_size: int = setting(64, ge=1)
    """Prompts per step over all ranks; each is sampled `rollout.n` times."""
    gen_batch_size: int | None = setting(None, ge=1)
    """Prompts per generation over all ranks, with `algorithm.filter_groups`; null means `train_batch_size`."""
    max_prompt_length: int = setting(256, ge=1)
    """Longest prompt in tokens, chat template included."""
    max_response_length: int = setting(256, ge=1)
    """Longest response in tokens, end-of-sequence included."""
    overlong_prompts: str = setting("filter", choices=("filter", "left", "right", "middle", "error"))
    """Prompts longer than `max_prompt_length`: drop (`filter`), remove tokens at the `left`, `right` or `middle`
    (verl's `truncation`), or stop with an error. The run logs the number of such prompts."""
    cache_dir: str | None = setting(None, resume="harmless")
    """Folder for tokenized prompts of large files, shared by all runs and the ranks of a node. null means
    `rlhf_prompts` in the cache of Hugging Face datasets."""
    shuffle: bool = setting(True)
    """Shuffle prompts in each epoch, with an order that depends only on the seed and the epoch."""
    train_max_samples: int | None = setting(None, ge=1)
    """Use only this many training prompts, from the start; null uses all."""
    val_max_samples: int | None = setting(None, ge=1, resume="harmless")
    """Use only this many held-out prompts, from the start; null uses all."""
    reasoning_gym: ReasoningGymConfig = setting(ReasoningGymConfig)
