"""`diloco-node doctor`: what keeps a region from running well, each with its remedy, before and during a run."""
