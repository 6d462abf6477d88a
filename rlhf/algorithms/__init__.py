"""Computes advantages, losses, KL, aggregation, correction and shaping in pure tensor functions, looked up by name.

The algorithms use no models, process groups or files: callers pass collectives as arguments. Values outside a mask,
NaN included, are ignored and get no gradient.
"""
