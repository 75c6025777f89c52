"""Whether a run is well, from status documents: alerts, how many regions may fail, what slows it down. Pure."""
