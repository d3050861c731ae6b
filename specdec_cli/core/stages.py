"""Names of a round's stages, used by every record, table and drawing. Imports nothing."""

STAGES = ("draft", "broadcast", "verify", "sample")  # in their order within a round
