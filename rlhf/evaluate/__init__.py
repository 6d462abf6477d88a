"""Evaluates policies without training, each in its own run folder, with the engines and rewards of a training run."""
