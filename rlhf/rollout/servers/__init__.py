"""Rollout servers: vLLM in processes of its own, over HTTP; started or found, watched, given weights, asked."""
