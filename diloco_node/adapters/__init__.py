"""The real world: gRPC, disk, Unix socket and shared memory, certificates, the admin API."""
