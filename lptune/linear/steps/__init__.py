"""What lives from step to step beside a layer: histories, random keys, precomputed scales, the first step's
verification. LowPrecision holds one of each.
"""
