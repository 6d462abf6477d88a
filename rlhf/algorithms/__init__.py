"""Computes advantages, losses, KL, aggregation, correction and shaping in pure tensor functions, looked up by name.

No function uses models, ranks or files. Values outside a mask, NaN included, are ignored and get no gradient.
"""
