"""Evaluates policies without training, each in a folder of its own, with the engines and rewards of a run."""
