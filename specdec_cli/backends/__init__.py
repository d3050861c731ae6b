"""Engines that answer requests, behind one interface: our own engine and inference servers."""
