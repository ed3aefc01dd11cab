"""Campaigns of runs that are broken on purpose, and what is measured of them."""
