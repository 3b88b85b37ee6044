"""Watch for changes of a user's model and optimizer that a replay would not notice."""
