"""`diloco-node demo`: several regions on one machine, as real processes with real links."""
