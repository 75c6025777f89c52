"""`diloco-node demo`."""
