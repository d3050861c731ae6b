"""Measures requests that arrive at a set rate: plans their arrival times and evaluates results."""
