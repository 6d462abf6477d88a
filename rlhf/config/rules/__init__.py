"""Checks settings against each other, one module per subject; `validate` runs all checks."""
