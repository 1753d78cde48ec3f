"""Low-rank adapters and quantised base weights: configuration, files, outlines."""
