"""The torch side: attach, snapshot and apply, the built-in trainer. The only place that imports torch."""
