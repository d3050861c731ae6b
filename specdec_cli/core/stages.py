"""The stages of a round, as every record, table and drawing names them. Imports nothing."""

STAGES = ("draft", "broadcast", "verify", "sample")  # in their order within a round
