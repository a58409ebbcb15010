"""State of layers that changes from step to step: amax histories, random keys, precomputed scales, and the
verification of the first step. LowPrecision has one object of each.
"""
