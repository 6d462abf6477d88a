"""Numerics version: releases with the same number compute the same bits from the same state, settings and software."""

NUMERICS = 1
"""The numerics version of this tree, which every checkpoint records.

Raise it by one in the commit that changes the bits of a step of any run that no setting changed: another order of
summation, another formula, other random numbers, other token ids from the same prompt. Do not raise it for a new
algorithm, for what only a new setting switches on, or where only `perf/*` and `timing_s/*` differ. The digests of short
runs in the tests find such a change; a new value of one of them is a new number here.
"""
