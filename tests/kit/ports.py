"""Ports for what a test starts."""

from diloco_node.lab.demo.region_processes import free_ports


def free_port() -> int:
    """Return a port that is free now, and that the kernel gives to nobody by itself."""
    return free_ports(1)[0]
