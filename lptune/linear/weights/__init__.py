"""Weights that travel: what FSDP gathers in 8 bits, and the amaxes by which ranks quantize alike."""
