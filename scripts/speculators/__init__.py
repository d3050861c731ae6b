"""Speculators for a target: texts, training, evaluation and storing."""

import time

from specdec_cli.launch.spinning import choose_spins

BEGAN = time.perf_counter()  # the start of the command, from which --minutes counts
# Before a command imports torch: beside other work its threads would wait for each other, ten times
# as long as a step of training takes.
choose_spins()
