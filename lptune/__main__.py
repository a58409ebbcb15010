"""`python -m lptune`: the command line, for the interpreter at hand."""

from lptune.cli.main import main

main()
