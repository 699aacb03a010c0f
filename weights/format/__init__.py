"""Layout, checksums and coding of a version's bytes, which all weight channels share."""
