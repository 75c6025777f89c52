"""The operator's door: the HTTP port, the status document, the metrics."""
