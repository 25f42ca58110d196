"""`python -m harness` is the command `attnbench`."""

from harness.cli import main

main()
