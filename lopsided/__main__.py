"""`python -m lopsided` is the command line."""

from lopsided.cli import main

main()
