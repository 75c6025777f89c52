"""The operator's port: status, metrics, and the few commands that change something."""
