"""Prompts: where they come from, how they become tokens, and the cursor over them. Importing this loads no torch."""

from rlhf.data.items import DrawnPrompt, Prompt
from rlhf.data.prompts import PromptSet
from rlhf.data.sources import build_train_set, build_val_set, check_sources
from rlhf.data.stream import PromptStream
