"""Every interpreter with this folder on its path imports this: plants faults in ranks."""

import os

if "RANK" in os.environ and "PLANTED_FAULT" in os.environ:
    from tests.launch.faults import plant

    plant(os.environ["PLANTED_FAULT"], int(os.environ["RANK"]))
