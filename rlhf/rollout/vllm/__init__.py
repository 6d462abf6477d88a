"""Runs vLLM inside the ranks, on their devices, and converts requests to vLLM's arguments."""
