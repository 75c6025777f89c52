"""Envelopes: msgpack with a strict schema, a version, and limits. Encodes and decodes only."""
