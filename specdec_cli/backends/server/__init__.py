"""A backend that measures inference servers over HTTP. Imports no torch."""
