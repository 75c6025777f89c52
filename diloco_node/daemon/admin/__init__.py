"""What an operator sees and does: the HTTP port, the status document, the metrics."""
