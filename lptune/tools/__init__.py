"""What asks about runs and machines, and is not needed to train; each folder is a command of `lptune`.

    advise     which kind of precision is fastest for a model on this device
    diff       what differs between two runs or two configs
    doctor     what this machine offers to a run, and what is wrong with it
    migrate    configs of other trainers become configs of lptune
    report     the curves of runs in one HTML file
    sweep      a run for each combination of values

Nothing outside this folder imports it (tests/test_architecture.py); lptune/cli/tools.py finds what is there.
A run that ends asks `report` for report.html, and a config with unknown keys is shown to `migrate`. Without
the folder, runs train, save, resume and export all the same.
"""
