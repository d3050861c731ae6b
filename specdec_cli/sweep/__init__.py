"""A sweep over proposal lengths: planned, measured, recorded and shown.

The names below serve other commands that measure points too.
"""

from specdec_cli.sweep.folder import (
    check_same,
    read_settings_file,
    reopened,
    warn_of_another_environment,
    write_settings,
)
from specdec_cli.sweep.order import units_of
from specdec_cli.sweep.plan import device_name, few_prompts, for_engine, only
from specdec_cli.sweep.records import peak_memory, sample_of

__all__ = [
    "check_same",
    "device_name",
    "few_prompts",
    "for_engine",
    "only",
    "peak_memory",
    "read_settings_file",
    "reopened",
    "sample_of",
    "units_of",
    "warn_of_another_environment",
    "write_settings",
]
