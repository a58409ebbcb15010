"""What every part needs and no part owns: errors, text, files, a model's folder, the hub, progress.

Imports nothing else of lptune, and only the standard library until a function needs more.
"""
