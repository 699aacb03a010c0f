"""Certificates: identities, a certificate authority, the folder of a process, and channels that use them."""
