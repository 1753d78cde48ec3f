"""The model of a role: loaded, adapted, wrapped by DeepSpeed, with its optimizer."""
