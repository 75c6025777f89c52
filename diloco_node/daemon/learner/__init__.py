"""The daemon's end of its learner."""
