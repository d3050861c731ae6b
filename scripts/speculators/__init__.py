"""Speculators for a target: texts, training, evaluation and storing."""

from specdec_cli.launch.spinning import choose_spins

# Before a command imports torch: beside other work its threads would wait for each other, ten times
# as long as a step of training takes.
choose_spins()
