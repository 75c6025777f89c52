"""`diloco-node dashboard` and `diloco-node report`: the page about all regions, live and as one file."""
