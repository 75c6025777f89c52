"""The kernel's counters of this process's TCP sockets, and the options that are set on them."""
