"""Devices of type `cuda` in software, on a CPU build of torch: `make test-device`.

`fakecuda.cpp` says how they work, `library` builds and loads it before torch is imported, `fake_device` is what tests
ask and tell it, `plugin` runs pytest on it.
"""
