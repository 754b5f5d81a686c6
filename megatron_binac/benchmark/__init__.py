"""Measurements: what a part of the system costs, printed as a table and as JSON."""
