"""Fault injection: kills, failing disks, damaged files, interrupted runs.

Each module is a script with counts as arguments (`python -m tests.faults.kills --help`). `make faults` runs
the long form of all of them, tests/faults/test_*.py a short form of each.
"""
