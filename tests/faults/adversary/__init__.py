"""An adversary at the command line: it may prepare files, variables, streams and moments.

    python -m tests.faults.adversary [--only SUBJECT] [--case "SUBJECT: NAME"] [--seed 0]

The other modules of tests/faults attack one function with many inputs. Here the whole product is attacked,
as `lptune …` in a process, and what is attacked is combined with how: each part of a run's folder x each kind
of thing that can stand in its place, each path of a config x each spelling, each text that is echoed x each
escape. A case is a row of such a table (tables: the modules named in `subjects.py`); it says how to prepare
the attack and which exit codes it may end with.

What must hold of every case is the same, and stands in one place (judge.py):

    the exit code is one of the case's: 0, 2, 3, 143, 130; never 1, which is a bug of lptune
    with 2 or 3 there is exactly one `error:` line, otherwise none; no traceback; the command ends
    no control character and none that reorders text comes out raw
    every file that was there before has its bytes, mode and inode, at its place or renamed
    with 2, where a case calls it a refusal, there is no file that was not there before
    a secret, in a file outside or in a variable, is in no file that was written and in no error line
    no temporary folder and no process is left
"""
