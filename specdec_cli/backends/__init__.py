"""Engines that answer requests, behind one interface: our own, and whatever serves models."""
