"""`python -m harness` is the command `attnbench`."""

from attnbench.cli import main

main()
