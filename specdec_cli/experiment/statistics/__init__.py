"""Computes estimates and intervals from samples of measured rounds, and finds noise in them."""
