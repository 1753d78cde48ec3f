"""The `rlhf` command, a module a command."""
