"""Plants faults in ranks; every interpreter with this folder on its path imports it."""

import os

if "SPECDEC_RANKS_FOLDER" in os.environ and "PLANTED_FAULT" in os.environ:
    from tests.launch.faults import plant

    plant(os.environ["PLANTED_FAULT"])
