"""`python -m lopsided` is the command line."""

from lopsided.cli.app import main

main()
