"""retime re-orders one training step and leaves its result unchanged."""
