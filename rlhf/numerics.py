"""Numerics version: releases with the same number compute the same bits from the same state, settings and software."""

NUMERICS = 3
"""The numerics version of this tree, which every checkpoint records.

Raise it by one in a commit after which some run computes other bits with the same settings: another order of summation,
another formula, other random numbers, other token ids from the same prompt. Do not raise it for a new algorithm, for
code that only a new setting enables, or if only `perf/*` and `timing_s/*` differ. Tests compare digests of short runs:
if a digest changes on purpose, raise this number.
"""
