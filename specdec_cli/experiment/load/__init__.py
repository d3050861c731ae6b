"""Requests that arrive at a rate: due times, the measured window, and the conclusions from it."""
