"""Converts conversations to tokens and back: prompts with tools, the tokens between turns, and the calls in a turn."""
