"""What steps were observed to take, held against their plan, and the cluster corrected by it."""
