"""What depends on hardware: the GPUs that lptune knows, and the one that a dry run stands for. Imports no
torch at the top, and nothing of lptune but base: every part may ask.
"""
