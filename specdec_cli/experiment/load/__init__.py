"""Requests that arrive at a rate: due times, the measured window, and what follows from it."""
