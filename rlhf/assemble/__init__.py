"""Assembly of a rank: every component from its own section of the configuration."""
