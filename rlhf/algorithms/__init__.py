"""Pure tensor functions (advantages, losses, KL, aggregation) and the table that names the algorithms. No models, no ranks, no config."""
