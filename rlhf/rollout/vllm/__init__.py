"""vLLM in the ranks: the engine that shares their devices, and a request in its words."""
