"""Support multi-token prediction."""
