"""`python -m learner` is the command `farmhand`, also where no script of that name is on the path."""

from learner.cli import main

main(prog_name="farmhand")
