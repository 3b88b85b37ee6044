"""The rules of features that a configuration file, a program and a command line share."""
