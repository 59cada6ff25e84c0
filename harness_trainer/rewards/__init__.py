"""Turning what an agent left behind into a number."""
