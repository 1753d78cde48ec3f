"""The weight-sync protocol: manifest, source, sending, receiving, deltas, checksums."""
