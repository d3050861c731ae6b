"""A sweep over proposal lengths: planned, measured, recorded and shown.

The names below serve other commands that measure points too.
"""

from specdec_cli.experiment.sweep.order import units_of
from specdec_cli.experiment.sweep.sweep_folder import (
    check_same,
    earlier_environment,
    keep_environment_warning,
    read_settings_file,
    read_warnings,
    reopened,
    write_settings,
)
from specdec_cli.experiment.sweep.sweep_plan import (
    device_name,
    few_prompts,
    for_engine,
    only,
    with_weights,
)
from specdec_cli.experiment.sweep.sweep_records import peak_memory, sample_of

__all__ = [
    "check_same",
    "device_name",
    "earlier_environment",
    "few_prompts",
    "for_engine",
    "keep_environment_warning",
    "only",
    "peak_memory",
    "read_settings_file",
    "read_warnings",
    "reopened",
    "sample_of",
    "units_of",
    "with_weights",
    "write_settings",
]
