"""Weights that FSDP gathers in 8 bits, and the amaxes from which all ranks compute the same scales."""
