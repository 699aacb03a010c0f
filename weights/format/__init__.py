"""Layout, checksums and coding of a version's bytes, the same on every way."""
