"""What a region holds and lacks: its versions, what it fetches, and whether equal versions are equal."""
