"""Layouts of Hugging Face and its Trainer, read; upload to the Hub."""
