"""Section `data`: prompts, batches and lengths."""

from dataclasses import dataclass
from typing import Any

from rlhf.config.schema.fields import setting


@dataclass
class ReasoningGymConfig:
    task: str = setting("chain_sum")
    """A dataset name of the reasoning-gym library."""
    config: dict[str, Any] = setting({})
    """Settings of that dataset, e.g. {min_terms: 2, max_terms: 2}."""
    train_size: int = setting(20000, ge=1)
    """Problems in the training set."""
    val_size: int = setting(500, ge=1)
    """Held-out problems; none of their questions is in the training set."""


@dataclass
class DataConfig:
    train_files: Any = setting(None)
    """Parquet, JSONL, JSON or CSV files, globs, or Hub dataset names; one or a list. null trains on
    `data.reasoning_gym`."""
    val_files: Any = setting(None, resume="harmless")
    """Held-out prompts, as `train_files`. With train_files set and this null there is no evaluation."""
    prompt_key: str = setting("prompt")
    """Column with the prompt: a chat list of {role, content}, or a plain string."""
    answer_key: str = setting("answer")
    """Column with the reference answer in sets without verl's `reward_model.ground_truth`."""
    system_prompt: str | None = setting(None)
    """System message of prompts that have none of their own."""
    apply_chat_template_kwargs: dict[str, Any] = setting({})
    """Variables of the chat template, e.g. {enable_thinking: false} of Qwen3's."""
    train_batch_size: int = setting(64, ge=1)
    """Prompts per step over all ranks; each is sampled `rollout.n` times."""
    gen_batch_size: int | None = setting(None, ge=1)
    """Prompts per generation with `algorithm.filter_groups`, over all ranks; null means `train_batch_size`."""
    max_prompt_length: int = setting(256, ge=1)
    """Longest prompt in tokens, chat template included."""
    max_response_length: int = setting(256, ge=1)
    """Longest response in tokens, end-of-sequence included."""
    overlong_prompts: str = setting("filter", choices=("filter", "left", "right", "middle", "error"))
    """Prompts longer than the limit: drop them, truncate at a side (verl's `truncation`), or refuse the data set.
    Always counted."""
    cache_dir: str | None = setting(None, resume="harmless")
    """Folder for tokenised prompts of large files, shared by the ranks of a node and by all runs. null means
    `rlhf_prompts` in the cache of Hugging Face's datasets."""
    shuffle: bool = setting(True)
    """A new order each epoch, from the seed and the epoch's number."""
    train_max_samples: int | None = setting(None, ge=1)
    """Use only the first so many training prompts."""
    val_max_samples: int | None = setting(None, ge=1, resume="harmless")
    """Use only the first so many held-out prompts."""
    reasoning_gym: ReasoningGymConfig = setting(ReasoningGymConfig)
