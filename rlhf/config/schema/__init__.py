"""Defines each section of the configuration in a module of its own; `rlhf.config.Config` combines the sections."""
