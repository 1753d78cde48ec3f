"""Where programs run that nobody trusts: providers of `rlhf_core.Sandbox`, and how one is chosen."""
