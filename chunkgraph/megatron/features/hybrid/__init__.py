"""Support Mamba layers next to attention."""
