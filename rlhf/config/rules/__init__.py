"""Checks settings against each other, one module per subject; `validate` runs all checks.

Each check yields one line per problem, with the setting, its value and the remedy.
"""
