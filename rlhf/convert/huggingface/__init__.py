"""Reads folders of Hugging Face and its Trainer; uploads to the Hub."""
