"""Versions that a region holds and lacks: their files, their fetches, and whether equal versions are equal."""
