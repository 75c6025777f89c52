"""`diloco-node deploy`: a run brought to other machines and started there."""
