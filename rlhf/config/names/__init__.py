"""Hints for wrong names and values: names of other trainers, and the most likely setting."""
