"""The tests mirror the package; `tests/kit` has what several of them share."""
