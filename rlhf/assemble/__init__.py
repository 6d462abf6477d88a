"""Builds the components of a rank, each from its own section of the configuration."""
