"""`python -m attnbench` is the command `attnbench`."""

from attnbench.cli import main

main()
