"""Run the command `attnbench` as `python -m attnbench`."""

from attnbench.cli import main

main()
