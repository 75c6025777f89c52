"""Faults on purpose: one seeded plan of them, what carries it out on real processes, and what it cost."""
