"""One dataclass module per section of the configuration; `rlhf.config.Config` combines the sections."""
