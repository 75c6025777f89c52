"""For all tests: nothing here depends on how fast this machine is."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# An example that takes long, or is made slowly, says something about the machine only.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")
