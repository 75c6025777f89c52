"""The asyncio shell around the cores: the pump, the data plane, the daemon, the supervisor."""
