"""Import it before torch, and this process has the devices."""

from tests.kit.fakecuda import fake_device

fake_device.install()
