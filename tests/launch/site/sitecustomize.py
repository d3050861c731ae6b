"""Plants faults in ranks; every interpreter with this folder on its path imports it."""

import os

if "RANK" in os.environ and "PLANTED_FAULT" in os.environ:
    from tests.launch.faults import plant

    plant(os.environ["PLANTED_FAULT"], int(os.environ["RANK"]))
