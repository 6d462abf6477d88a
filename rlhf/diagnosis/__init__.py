"""Checks of the machines that a run uses, for python -m rlhf.doctor and for the supervisor after repeated crashes."""
