"""The parent of a region's daemon and learner: standard library only, small, with nothing to crash on."""
