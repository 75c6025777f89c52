"""Costs of a schedule, whether links and budget can keep it, and what to change if they can't."""
