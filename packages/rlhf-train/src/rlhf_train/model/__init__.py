"""From a checkpoint to a model ready for DeepSpeed."""
