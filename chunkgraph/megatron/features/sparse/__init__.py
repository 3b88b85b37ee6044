"""Support for sparse attention."""
