"""Ready-made systems: short files to read and to copy."""
