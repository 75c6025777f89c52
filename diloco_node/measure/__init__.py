"""Measuring links: round trips and goodput by the path that a run takes."""
