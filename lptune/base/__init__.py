"""What every part needs and no part owns: files.py, the one way to write a file and to read JSON."""
