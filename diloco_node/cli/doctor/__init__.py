"""`diloco-node doctor`: find what keeps a region from running well, before and during a run."""
