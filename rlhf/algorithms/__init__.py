"""Pure tensor functions (advantages, losses, KL, aggregation, correction, shaping) and the table that names the algorithms.

No models, no ranks, no files. What lies outside a mask is ignored, NaN included, and gets no gradient.
"""
