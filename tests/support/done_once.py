"""Warms up the server of ranks: loads command-line parsers and reads transformers' files, once for all."""

from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.planning.device_defaults import Machine

compose_config(["trainer.total_training_steps=1"], Library.find(None), Machine(0, None))
