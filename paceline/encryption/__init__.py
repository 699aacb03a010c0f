"""What a deployment keeps on disks and in stores, encrypted with the operator's key."""
