"""Runs vLLM servers or connects to running ones over HTTP: health checks, weight sync, requests."""
