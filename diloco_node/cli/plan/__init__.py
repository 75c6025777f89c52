"""`diloco-node plan`."""
