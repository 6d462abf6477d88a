"""Collects the batch of each step from prompts, rollouts and rewards, and evaluates on held-out prompts."""
