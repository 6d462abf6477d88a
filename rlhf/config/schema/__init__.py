"""Sections of the configuration, one dataclass module each; `rlhf.config.Config` is the whole."""
