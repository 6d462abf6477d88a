"""Conversations as tokens: prompts with tools, the tokens between turns, and the calls in a turn."""
