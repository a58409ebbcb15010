"""What depends on hardware: the GPUs that lptune knows, the one that a dry run stands for, and alternatives
that wait for a measurement. Imports no torch at the top, and nothing of lptune but base: every part may ask.
"""
