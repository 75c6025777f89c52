"""Links to all other regions: gRPC over HTTP/2 with mutual TLS, one port, a control lane and a bulk lane."""
