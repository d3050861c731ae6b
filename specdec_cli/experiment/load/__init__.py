"""Requests that arrive at a rate: their due times, the measured window, and the conclusions."""
