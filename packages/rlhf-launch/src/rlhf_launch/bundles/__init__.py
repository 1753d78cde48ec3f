"""Step bundles: all that a training step worked on, kept as files."""
