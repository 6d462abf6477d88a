"""Loads policies, critics and reward models, and makes the small offline model of the package."""
