"""Steps in which tokens found no room run again."""
