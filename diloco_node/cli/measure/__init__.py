"""`diloco-node measure`."""
