"""Reads Hugging Face folders and the Trainer's; uploads to the Hub."""
