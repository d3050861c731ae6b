"""Run folders: their records, settings and files, written, resumed and read."""
