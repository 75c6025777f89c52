"""What the kernel knows of this process's TCP sockets, and what it is told about them."""
