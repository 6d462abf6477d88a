"""Pure tensor functions: advantages, losses, KL, aggregation, correction, shaping; and their lookup by name.

No models, no ranks, no files. What lies outside a mask is ignored, NaN included, and gets no gradient.
"""
