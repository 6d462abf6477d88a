"""Translates configurations of verl, TRL and OpenRLHF into recipes (python -m rlhf.translate)."""
