"""Reads prompts, tokenizes them and draws them in order. Importing this package loads no torch."""

from rlhf.data.items import DrawnPrompt, Prompt
from rlhf.data.prompts import PromptSet
from rlhf.data.sources import build_train_set, build_val_set, check_sources
from rlhf.data.stream import PromptStream
