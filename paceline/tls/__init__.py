"""Certificates: identities, a certificate authority, the folder that a process reads them from, and channels that use them."""
