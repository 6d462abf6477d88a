"""Loads policies, critics and reward models, adds LoRA adapters, and trains the small bundled policy."""
