"""What a machine offers to a run, found by probes: `lptune doctor`.

    line.py        Line, one finding, and `examined`, which turns a failing probe into a finding
    host.py        processor, memory, disks, versions, compiler, caches, environment: no torch
    with_torch.py  GPUs, kinds, collectives, torch.compile: in a child process
    child.py       that process, and its reader

Each probe is a function without side effects on the machine that yields Lines. What a probe raises is one of
its findings. Code that may end a process (a driver, a compiled kernel) runs in the child, so the report is
always printed whole.
"""
