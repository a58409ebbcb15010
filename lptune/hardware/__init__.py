"""What depends on hardware: the GPUs that lptune knows, the one that a dry run stands for, and alternatives
that wait for a measurement. Imports no torch, and nothing of lptune but its config: every part may ask.
"""
