"""What every device does in a step, and what that costs: seconds, bytes, time lines."""
