"""What a run will take, found without its weights, data or GPU.

    dry_run.py            one step on fake tensors: precision, memory and collectives of each rank
    repeated_blocks.py    runs one of blocks that are alike
    memory.py             the log of allocations, and its peak
    fit.py                whether it fits a GPU, and which changes make it fit
    traffic.py            the operations of a layer, and the bytes that they move
    from_counts.py        from these counts and FLOPs to the time of a step on a GPU that is not here

`lptune plan` shows the first four, and `lptune advise` the last two.
"""
