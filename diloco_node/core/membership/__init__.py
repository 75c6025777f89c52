"""Membership: liveness of the regions and their learners."""
