"""Weights that FSDP gathers in 8 bits, the amaxes from which all ranks compute the same scales, and what one
rank computes with instead of gathered weights.
"""
