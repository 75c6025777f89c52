"""Callbacks with which training loops of other libraries join a run. Each module imports its library."""
