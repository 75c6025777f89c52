"""`diloco-node plan`: what a model needs of links, memory and disk."""
