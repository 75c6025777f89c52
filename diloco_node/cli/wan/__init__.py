"""`diloco-node wan`."""
