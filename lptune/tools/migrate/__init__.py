"""Configs of other trainers become configs of lptune, key by key.

    draft.py     what a migration collects, the walk over a file's keys, what several tools share
    entries.py   data sets
    TOOL.py      for each tool: what needs several keys at once, and defaults that differ; its data sets, as
                 entries of data.source; a table of rules: their key -> what becomes of it
    report.py    the report for the terminal, and the YAML with the source of each line
    reading.py   reads the file and finds the tool by its content

A rule says one of four things: the key has the same meaning here; it becomes a key whose meaning differs,
and how; it has no equivalent, and why; the user must fill something in. A key without a rule is named in the
report, too: no key of the file disappears. Values that the other tool would take for keys that are *not* in
the file are written out where ours differ, because an equal file with unequal defaults is another training.

Nothing of the file is imported or executed. Names such as `torch.optim.AdamW` are looked up in tables.
"""
