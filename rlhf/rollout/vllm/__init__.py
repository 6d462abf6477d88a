"""vLLM: which releases, what it is told, and the engine that shares the ranks' devices."""
