"""A sweep: one run for each combination of the values that some keys have on the command line.

    grid.py     `optimizer.lr=1e-5,3e-5` -> values -> combinations -> a name for each run
    record.py   sweep.json: which runs have ended, and with which exit code; the table of the runs

The runs themselves are processes of `lptune run` (lptune/tools/sweep/command.py).
"""
