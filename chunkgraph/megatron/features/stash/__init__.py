"""Store the saved activations of experts in pages."""
