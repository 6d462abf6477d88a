"""Rules across settings, by subject; `validate` applies them all."""
