"""python -m rlhf.doctor OVERRIDES: checks the machines of a run, and shows the remedy for each problem."""

from rlhf.cli import command

if __name__ == "__main__":
    command.begin()

import sys

from rlhf.cli.doctor import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    command.leave(code)
