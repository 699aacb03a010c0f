"""TLS: a certificate authority, the certificates of processes, and channels that use certificates."""
