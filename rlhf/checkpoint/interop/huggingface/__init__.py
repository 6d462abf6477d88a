"""Hugging Face folders, read and written, and their upload."""
