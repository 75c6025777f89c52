"""Who is there: liveness of the regions and their learners."""
