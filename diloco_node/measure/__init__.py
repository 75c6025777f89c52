"""Measuring links: round trips and bandwidth, between running daemons or between ends without a core."""
