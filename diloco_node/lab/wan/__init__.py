"""A WAN on one machine: regions as network namespaces, with the delay, rate, loss and outages of a topology file."""
